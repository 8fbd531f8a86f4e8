"""Driver of a study in the user's process: the scheduler that it finds, and the code that goes to the replicas."""
