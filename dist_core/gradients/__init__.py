"""From the backward pass to the update."""
