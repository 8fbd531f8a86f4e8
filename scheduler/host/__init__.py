"""A scheduler on this machine: one process, its folder, and what it owns."""
