"""State of a trial: named states, random streams, checkpoints."""
