"""What a training script holds: its loader, its wrapped model, its sums, and the functions it calls."""
