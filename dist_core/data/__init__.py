"""Which examples come next."""
