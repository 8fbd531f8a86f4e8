"""Messages between a replica and its scheduler."""
