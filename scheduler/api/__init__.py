"""The scheduler's HTTP API: one side for tuners and tools, one for replicas. It decides nothing."""
