"""Data prepared once for all trials of a study, by the replicas that want it; each opens it without a copy."""
