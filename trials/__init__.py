"""Trials, and how their replicas start and stop. Never imports torch."""
