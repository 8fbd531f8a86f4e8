"""What people look at: the terminal view and the picture of slots over time. Reads the API's answers, decides nothing."""
