"""The one thread that changes trials: it observes, allocates, plans and acts, again and again."""
