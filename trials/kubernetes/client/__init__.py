"""The API server: requests, and lists that stay up to date."""
