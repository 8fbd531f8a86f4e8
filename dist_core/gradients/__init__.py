"""Gradients from the backward pass to the update."""
