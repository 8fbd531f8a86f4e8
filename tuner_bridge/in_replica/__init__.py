"""Replica's half: what the driver sent is read and run, and what goes back is wired."""
