"""Who trains together, and how that changes."""
