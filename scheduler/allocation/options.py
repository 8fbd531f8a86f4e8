"""Choice of an option for each trial, where each option takes slots of one group of nodes: an integer programme.

As in Sia (Jayaram Subramanya et al., SOSP'23, section 3.3), solved by HiGHS (Huangfu and Hall, 2018) through SciPy:

    maximise  sum_jo  values_jo x_jo      sum_o x_jo <= 1,   sum_j,o in g  slots_o x_jo <= capacity_g,   x binary
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

GAP = 1e-4
MOST_NODES = 2000
"""Most nodes of the branch-and-bound tree; a limit in time would make the answer depend on the machine."""


def choose_options(values: Floats, slots: Integers, group: Integers, capacity: Integers) -> Integers:
    """Index of each trial's option, -1 for none; values (J, O), -inf forbids; slots and group (O,), capacity (G,)."""
    # Importing them takes a third of a scheduler's start, and most schedulers have nodes of one kind.
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    chosen = np.full(len(values), -1, dtype=np.int64)
    rows, columns = np.nonzero(np.isfinite(values) & (values > 0))
    if not len(rows):
        return chosen
    size = len(rows)
    one_each = sparse.csr_array((np.ones(size), (rows, np.arange(size))), shape=(len(values), size))
    room = sparse.csr_array((slots[columns], (group[columns], np.arange(size))), shape=(len(capacity), size))
    worth = values[rows, columns]
    solution = milp(
        -worth / np.abs(worth).max(),
        integrality=np.ones(size),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, ub=1), LinearConstraint(room, ub=capacity)],
        options={"mip_rel_gap": GAP, "node_limit": MOST_NODES},
    )
    if solution.x is None:
        return chosen
    taken = np.round(solution.x) > 0
    chosen[rows[taken]] = columns[taken]
    return chosen
