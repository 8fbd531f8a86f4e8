"""Knowledge of trials: what was measured of them, and what that promises."""
