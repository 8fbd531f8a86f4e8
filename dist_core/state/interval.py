"""How often to write checkpoints: what one costs against what a failure would. Pure; times come from the caller.

The optimum of Young (1974) in Daly's (2006) higher-order form, for checkpoint cost C and mean time to failure M:

    interval = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C        for C < 2M, else M

C is what training loses to a checkpoint: the time it stops, and the writer's share of the processors. M is learnt from
this trial's own failures, on top of a weak belief in four hours.
"""

from __future__ import annotations

import math

SHORTEST_SECONDS = 1.0
LONGEST_SECONDS = 600.0
BELIEVED_SECONDS = 4 * 3600.0
"""Mean time to failure that is assumed before anything is known."""
BELIEF = 0.25
"""Weight of that assumption, in failures."""


def mean_time_to_failure(*, failures: int, trained_seconds: float) -> float:
    return (BELIEF * BELIEVED_SECONDS + trained_seconds) / (BELIEF + failures)


def checkpoint_interval(*, cost_seconds: float, failures: int, trained_seconds: float) -> float:
    """Seconds of training between the starts of two checkpoints."""
    cost = max(cost_seconds, 0.0)
    mean = mean_time_to_failure(failures=failures, trained_seconds=trained_seconds)
    if cost >= 2.0 * mean:
        interval = mean
    else:
        ratio = cost / (2.0 * mean)
        interval = math.sqrt(2.0 * cost * mean) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost
    return min(LONGEST_SECONDS, max(SHORTEST_SECONDS, interval))
