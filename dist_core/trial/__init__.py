"""Core of a replica: what it does for its trial, put together."""
