"""Generations: the replicas that train together, and how that set changes."""
