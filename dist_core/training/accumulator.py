"""Accumulator: sums over all replicas of what each adds up on its own, as in training and evaluation loops."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dist_core.errors import InvalidTraining, RunAgain
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.trial.current import get_core

if TYPE_CHECKING:
    from typing_extensions import Self


class _Addend:
    """Result of reading a key while values are only added: good for ``+=`` and ``-=``, and nothing else."""

    __slots__ = ("key", "owner", "value")

    def __init__(self, owner: Accumulator, key: str, value: float) -> None:
        self.owner, self.key, self.value = owner, key, value

    def __add__(self, other: float) -> _Addend:
        return _Addend(self.owner, self.key, self.value + _number(self.key, other))

    def __sub__(self, other: float) -> _Addend:
        return _Addend(self.owner, self.key, self.value - _number(self.key, other))


class Accumulator(MutableMapping[str, Any]):
    """Add numbers under string keys; inside ``synchronized()`` the keys hold the sums over all replicas.

    ::

        totals = Accumulator()
        totals["correct"] += 3
        with totals.synchronized():
            print(totals["correct"])

    Outside, a replica knows only its own part: reading is refused there, and the mapping looks empty. Sums go on
    growing from one ``synchronized()`` to the next until ``clear()`` inside of one. What is written inside has to be
    the same on all replicas. Sums are part of the trial's state: they survive rescales and restarts. Where a trial is
    resumed within an epoch, code between its loops runs again: a ``synchronized()`` that was passed then shows what it
    showed, and changes nothing.

    Args:
        *arguments: A mapping of first values, as ``dict`` takes it.
        **initial: First values by key.
    """

    def __init__(self, *arguments: Any, **initial: float) -> None:
        self._results: dict[str, Any] = dict(*arguments, **initial)
        self._pending: dict[str, float] = {}
        self._sent: dict[str, float] = {}
        """Values in the present step's round: summed when it is complete, still this replica's if it is not."""
        self._taken_back: dict[str, float] | None = None
        self._synchronized = False
        self._mark: tuple[dict[str, Any], dict[str, float]] | None = None
        self._shown: list[dict[str, Any]] = []
        """The sums at each ``synchronized()`` between this epoch's loops, those of earlier runs too."""
        self._passed = 0
        """Number of them that this process has passed."""
        self._inside_last = False
        """True while the code within the last of them has not ended."""
        self._behind: dict[str, Any] | None = None
        """The sums as they are, while earlier ones are shown."""
        get_core().sums.adopt(self)
        self.mark()

    # ------------------------------------------------------------------ adding

    def __getitem__(self, key: str) -> Any:
        if self._synchronized:
            return self._results[key]
        return _Addend(self, key, 0.0)

    def __setitem__(self, key: str, value: Any) -> None:
        if self._synchronized:
            self._results[key] = value
        elif not isinstance(value, _Addend) or value.owner is not self or value.key != key:
            raise InvalidTraining(
                f"Accumulator[{key!r}] was set to {value!r} outside of synchronized(), where values can only be "
                f"added: accumulator[{key!r}] += value"
            )
        else:
            core = get_core()
            core.sums.additions += 1
            added = value.value if core.adds_up else 0.0
            self._pending[key] = self._pending.get(key, 0.0) + added

    def __iadd__(self, other: Any) -> Self:
        self.update(other)
        return self

    def __isub__(self, other: Any) -> Self:
        self.subtract(other)
        return self

    def update(self, *arguments: Any, **values: float) -> None:
        """Add each value to its key."""
        for key, value in dict(*arguments, **values).items():
            self[key] += value

    def subtract(self, *arguments: Any, **values: float) -> None:
        """Subtract each value from its key."""
        for key, value in dict(*arguments, **values).items():
            self[key] -= value

    # ------------------------------------------------------------------ reading

    def __delitem__(self, key: str) -> None:
        if not self._synchronized:
            raise KeyError(key)
        del self._results[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results if self._synchronized else ())

    def __len__(self) -> int:
        return len(self._results) if self._synchronized else 0

    def __contains__(self, key: object) -> bool:
        return self._synchronized and key in self._results

    def __repr__(self) -> str:
        return repr(self._results if self._synchronized else {})

    @contextmanager
    def synchronized(self) -> Iterator[Accumulator]:
        """Sum over the replicas what was added since the last time; inside, read and write the sums. Collective."""
        if self._synchronized:
            yield self
            return
        if not get_core().loops.are_between:
            self.settle()
            yield from self._open()
            return
        self._passed += 1
        if self._passed <= len(self._shown):
            yield from self._show_again(self._shown[self._passed - 1])
            return
        self.settle()
        self.mark()
        self._shown.append(copy.deepcopy(self._results))
        self._inside_last = True
        try:
            yield from self._inside_of_last()
        finally:
            self.mark()

    def _open(self) -> Iterator[Accumulator]:
        self._synchronized = True
        try:
            yield self
        finally:
            self._synchronized = False

    def _show_again(self, sums: dict[str, Any]) -> Iterator[Accumulator]:
        """Show the sums of a place that the trial was resumed behind: its code had its effect then.

        Unless it was resumed within the code here, which has its effect now.
        """
        is_the_last = self._passed == len(self._shown)
        self._pending = {}
        self._behind, self._results = self._results, copy.deepcopy(sums)
        was_inside = self._inside_last
        try:
            yield from self._inside_of_last() if is_the_last else self._open()
        finally:
            if not (is_the_last and was_inside):
                self._results = self._behind
            self._behind = None
            self.mark()

    def _inside_of_last(self) -> Iterator[Accumulator]:
        """Let the code within have its effect now, unless it is undone and runs again."""
        try:
            yield from self._open()
        except RunAgain:
            raise
        except BaseException:
            self._inside_last = False
            raise
        self._inside_last = False

    def begin_epoch(self) -> None:
        self._shown, self._passed, self._inside_last = [], 0, False

    def settle(self) -> bool:
        """Move what every replica has added into the sums; collective.

        False if a replica was lost within a training loop: its body runs again, until then the sums are as they were.
        """
        self._pending, self._sent = self._not_summed(), {}
        pending = get_core().together(self._sums_over, otherwise=lambda: None)
        if pending is None:
            return False
        self._pending = {}
        self._fold(pending)
        return True

    def _sums_over(self, group: ReplicaGroup) -> dict[str, float] | None:
        if group.world_size == 1:
            return self._pending
        keys = sorted({key for keys in group.gather_json(sorted(self._pending)) for key in keys})
        sums = group.sum_of(*(self._pending.get(key, 0.0) for key in keys), what=str(keys))
        return dict(zip(keys, sums, strict=True))

    def mark(self) -> None:
        """Mark a point to which additions may have to be taken back."""
        self._mark = dict(self._results), dict(self._pending)

    def forget_mark(self) -> None:
        self._mark = None

    def back_to_mark(self) -> None:
        """Take back what was added since the mark: that code runs again."""
        if self._mark is not None:
            self._taken_back = self._pending
            self._results, self._pending = self._mark
            self._mark, self._sent = None, {}

    def catch_up(self, state: dict[str, Any]) -> None:
        """Count what was taken back after all; of it, what was sent is in another replica's sums."""
        self._results = dict(state["results"])
        self._pending, self._taken_back = self._taken_back or {}, None

    # ------------------------------------------------------------------ one step's round

    @property
    def summed_keys(self) -> list[str]:
        """Keys of numbers that all replicas have a sum of."""
        return sorted(key for key, value in self._results.items() if isinstance(value, (int, float)))

    def count_new_keys(self) -> int:
        return len(self._pending.keys() - set(self.summed_keys))

    def send(self, key: str) -> float:
        """Return what was added under this key since the last step's round."""
        value = self._sent[key] = self._pending.pop(key, 0.0)
        return value

    def receive(self, key: str, total: float | None) -> None:
        """Receive the sum over all replicas, unless it was settled meanwhile; None if nothing came of it."""
        if key not in self._sent:
            return
        mine = self._sent.pop(key)
        if total is None:
            self._pending[key] = self._pending.get(key, 0.0) + mine
        else:
            self._fold({key: total})

    def _not_summed(self) -> dict[str, float]:
        keys = {**self._pending, **self._sent}
        return {key: self._pending.get(key, 0.0) + self._sent.get(key, 0.0) for key in keys}

    def _fold(self, pending: Mapping[str, float]) -> None:
        for key, value in pending.items():
            self._results[key] = self._results.get(key, 0.0) + value

    def state_dict(self) -> dict[str, Any]:
        return {
            "results": dict(self._results if self._behind is None else self._behind),
            "pending": self._not_summed(),
            "shown": copy.deepcopy(self._shown),
            "inside_last": self._inside_last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from another replica's or an earlier run's sums; what it had not summed counts as summed.

        Unless that is this replica's own (``RunningSums.own``).
        """
        self._results = dict(state["results"])
        self._pending, self._sent = dict(state.get("own", {})), {}
        self._fold(state["pending"])
        self._shown, self._inside_last = copy.deepcopy(state["shown"]), state["inside_last"]


def _number(key: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    try:
        if isinstance(value, (bool, _Addend)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise InvalidTraining(f"Accumulator[{key!r}] was given {value!r}; only numbers can be summed") from None
