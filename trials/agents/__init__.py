"""Replicas on other machines: an agent on each looks after them, for a launcher beside the scheduler."""
