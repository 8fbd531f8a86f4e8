"""What a replica and its scheduler say to each other."""
