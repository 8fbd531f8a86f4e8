"""Objects of a training script: its loader, its wrapped model, its sums, and the functions it calls."""
