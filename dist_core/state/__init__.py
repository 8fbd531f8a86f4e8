"""What is kept of a trial: named states, random streams, checkpoints."""
