"""What was measured of trials, and what it promises."""
