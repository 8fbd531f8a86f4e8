"""Slurm: nodes of an allocation, and jobs of a queue, on which agents run replicas."""
