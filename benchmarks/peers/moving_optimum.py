"""The toy problem of Ray Tune's own examples of population based training: an optimum that moves as training goes on.

A step's gain falls with the distance of the learning rate from the best one, which rises and falls with the accuracy.
"""

import numpy as np

MIDWAY = 100.0
LARGEST, LEAST = 0.01, 0.001
TOLERANCE = 3.0
NOISE = 2.0
LOWEST_RATE, HIGHEST_RATE = 1e-4, 0.02


def step(accuracy: float, rate: float, random: np.random.Generator) -> float:
    """Return the accuracy after a step."""
    part = accuracy / MIDWAY
    best = min(LARGEST, max(LEAST, LARGEST * (part if accuracy < MIDWAY else 1.0 - (part - 1.0))))
    off = max(rate, best) / min(rate, best)
    if off < TOLERANCE:
        accuracy += random.random() / off
    elif rate > best:
        accuracy -= (off - TOLERANCE) * random.random()
    return max(0.0, accuracy + NOISE * float(random.normal()))
