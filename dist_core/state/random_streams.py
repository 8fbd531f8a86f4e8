"""Random streams of a replica: rank 0 draws the trial's numbers, every other rank has a stream of its own.

Dropout masks and augmentations of equal streams would be equal too, on all replicas, and the noise scale takes the
parts of a batch for independent. So a replica that enters a generation with a rank other than 0 starts streams that
follow from the trial's seed, its rank and the generation; rank 0 goes on with its own, as one process alone would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dist_core.life import Listener
from dist_core.state.seeds import derived_seed, seed_all


class RandomStreams(Listener):
    """Python's, NumPy's and torch's generators (the current CUDA device's too, where there is one), as a state."""

    def __init__(self) -> None:
        self._rank = 0
        self._seed: int | None = None

    @property
    def seed(self) -> int:
        """The trial's: what rank 0 was seeded with when it was first asked for."""
        if self._seed is None:
            self._seed = torch.initial_seed()
        return self._seed

    def entered(self, rank: int, number: int) -> None:
        if rank != 0 or self._rank != 0:
            seed_all(derived_seed(self.seed, rank, number))
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self._rank, "seed": self.seed, **_read()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the trial's seed, and the streams if they are of this replica's own rank."""
        self._seed = state["seed"]
        if state["rank"] == self._rank:
            _write(state)

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Keep the streams: behind the block this process draws what it would have drawn before."""
        before = _read()
        try:
            yield
        finally:
            _write(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators of the host within this block; afterwards they go on where they were."""
    before = _of_host()
    try:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield
    finally:
        _put_into_host(before)


class Drawing:
    """Generators of the host for one thing alone: within the block they are drawn from, outside the process's own."""

    def __init__(self) -> None:
        self._waiting = _of_host()
        """Outside of the block its own, within it the process's."""

    def begin(self, seed: int) -> None:
        """Draw what follows from this seed from now on; called outside of the block."""
        with seeded(seed):
            self._waiting = _of_host()

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        present = _of_host()
        _put_into_host(self._waiting)
        self._waiting = present


def _of_host() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _put_into_host(state: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


def _read() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": _as_lists(random.getstate()),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # not annotated in torch
        # What trains on the host alone has none to go back to.
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _write(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value
