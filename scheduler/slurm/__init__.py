"""A scheduler for nodes that Slurm has given, or gives on demand."""
