"""Trials as resources of the API server: what is written and read, who follows the changes, the store over them."""
