"""The gradient noise scale: measured and estimated."""
