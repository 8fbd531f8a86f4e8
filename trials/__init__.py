"""What a trial is and how its replicas start and stop. Never imports torch."""
