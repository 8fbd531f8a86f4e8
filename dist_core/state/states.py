"""Named states of a trial: what a checkpoint holds and what a joiner receives.

A state is anything with ``state_dict`` and ``load_state_dict``. Content that arrives for a name nobody has registered
yet waits until somebody does, because user code registers as it goes (a second loader, an accumulator made in the
epoch loop).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dist_core.errors import InvalidTraining

ENDED = "ended"
"""Folder, within that of a trial's checkpoints, of the state that it ended with."""


def kept_after(epochs: int) -> str:
    """Return the name of the folder beside it, of the state that the trial had after so many epochs."""
    return f"after-{epochs}"


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class StateRegistry:
    def __init__(self) -> None:
        self._states: dict[str, Stateful] = {}
        self._unclaimed: dict[str, Any] = {}
        self._inherited: set[str] = set()
        """Names of unclaimed states that are a parent's."""

    def register(self, name: str, state: Stateful) -> None:
        """Register a state; raise InvalidTraining if the name is taken."""
        if name in self._states:
            raise InvalidTraining(f"a state named {name!r} is already registered; give each state its own name")
        self._states[name] = state
        if name in self._unclaimed:
            _load(state, self._unclaimed.pop(name), inherited=name in self._inherited)

    def has(self, name: str) -> bool:
        return name in self._states

    def holds(self, state: object) -> bool:
        """Tell whether this object is registered."""
        return any(each is state for each in self._states.values())

    def replace(self, name: str, state: Stateful) -> None:
        """Let another object hold the state of that name from now on; it keeps its own content."""
        self._states[name] = state

    def forget(self, prefix: str) -> None:
        """Remove states whose name begins so from the trial's."""
        for content in (self._states, self._unclaimed):
            for name in [name for name in content if name.startswith(prefix)]:
                del content[name]

    def unique_name(self, prefix: str) -> str:
        """Return ``prefix-0``, ``prefix-1``, ... in order of registration, which is the same on every replica."""
        index = 0
        while f"{prefix}-{index}" in self._states:
            index += 1
        return f"{prefix}-{index}"

    def clear(self) -> None:
        """Forget all states: the user's code is about to run again from its top."""
        self._states.clear()
        self._unclaimed.clear()
        self._inherited.clear()

    def capture(self) -> dict[str, Any]:
        """Return all states by name, without copying tensors."""
        return {**self._unclaimed, **{name: state.state_dict() for name, state in self._states.items()}}

    def restore(self, content: dict[str, Any], *, inherited: bool = False) -> None:
        """Restore all states; of a parent trial's (``inherited``), not what is this trial's own."""
        self._inherited = set(content) if inherited else set()
        for name, value in content.items():
            if name in self._states:
                _load(self._states[name], value, inherited=inherited)
            else:
                self._unclaimed[name] = value


def _load(state: Any, value: dict[str, Any], *, inherited: bool) -> None:
    """Load a state; one with ``inherit`` tells a parent's content from its own trial's."""
    if inherited and hasattr(state, "inherit"):
        state.inherit(value)
    else:
        state.load_state_dict(value)


class FunctionState:
    """A state made of functions, for values that live in plain attributes.

    ``inherit``: loads the state of a parent trial, where that differs.
    """

    def __init__(
        self,
        save: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
        inherit: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.state_dict = save
        self.load_state_dict = load
        self.inherit = inherit or load
