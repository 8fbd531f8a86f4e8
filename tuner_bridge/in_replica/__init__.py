"""In a replica: what the driver sent is read and run; what goes back is wired."""
