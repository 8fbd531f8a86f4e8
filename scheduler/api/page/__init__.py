"""The web page: its files, its sessions, what it is told live, and what it asks for."""
