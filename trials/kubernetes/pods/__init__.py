"""Replicas as pods: their manifests, the nodes and quotas that limit them, the launcher."""
