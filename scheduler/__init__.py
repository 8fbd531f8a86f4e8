"""Who gets which slots, when. Never imports torch."""
