"""On a real Slurm: `make test-slurm`."""
