"""Seeds that follow from what they are for, and all generators of the host set to one."""

from __future__ import annotations

import hashlib
import random
import sys

import numpy as np


def derived_seed(*parts: object) -> int:
    """Return a seed below 2^63 that follows from the parts and is unlike that of any others."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def trial_seed(trial_id: str, sweeps_own: int | None) -> int:
    """Code that seeds nothing splits its data alike on all replicas, and again alike when the trial goes on later.

    Else samples that one of them validates on would be another's to train on. Trials differ all the same. A sweep gives
    the seed, so that it follows from the script's; without one it follows from the trial's name.
    """
    return derived_seed("trial", trial_id) if sweeps_own is None else sweeps_own


def present_seed() -> str:
    """Return a text that follows from where this process's generators stand, without moving them."""
    parts: list[object] = [random.getstate(), np.random.get_state()]
    if "torch" in sys.modules:
        parts.append(sys.modules["torch"].initial_seed())
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


FIRST_SEED = 67280421310721
"""Seed of a generator of torch's that nobody has seeded."""
_of_ours: set[int] = {FIRST_SEED}
"""Seeds that torch may have without the script's doing: its own first one, and those that we have given it."""


def seed_of_script() -> int | None:
    """Return the seed that the script has given torch; None where it has given none."""
    torch = sys.modules.get("torch")
    seed = None if torch is None else int(torch.initial_seed())
    return None if seed in _of_ours else seed


def seed_all(seed: int) -> None:
    """Seed Python's generator, NumPy's, and torch's if that is in memory."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    _of_ours.add(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
