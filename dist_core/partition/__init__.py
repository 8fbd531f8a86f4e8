"""Partition of a model that is too large for one device: costs of blocks, and where cuts lie best."""
