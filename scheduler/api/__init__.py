"""The scheduler's HTTP API: one side for tuners and tools, one for replicas. Facts in, facts out; it decides nothing."""
