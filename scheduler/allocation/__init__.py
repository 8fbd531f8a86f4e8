"""Tools of the policies: searching counts, packing them onto nodes, pricing the work that is left. Pure functions."""
