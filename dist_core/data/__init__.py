"""Order of the examples: which come next, and on which replica."""
