"""In the user's process: a study's driver, the scheduler that it finds, the code that goes to the replicas."""
