"""The scheduler of a cluster: the same loop, policy and API as on one machine, beside what only a cluster has."""
