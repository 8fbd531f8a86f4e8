"""What a replica does for its trial, put together."""
