"""Layout: how the slots of a replica hold one model, whole, sharded or as stages; with names that people can read."""

from __future__ import annotations

from typing import NamedTuple

WHOLE, SHARDED, STAGES = "", "sharded", "stages"
_RECOMPUTED = "recomputed"
MOST_SLOTS = 1024


class Layout(NamedTuple):
    """Layout of one model on the slots of a replica.

    ``str`` gives its name, such as ``4 stages recomputed``; ``from_name`` reads it.
    """

    slots: int = 1
    kind: str = WHOLE
    """``sharded`` or ``stages``; empty: the model is whole, or divided as the training code has it."""
    recomputes: bool = False
    """Activations are computed again for the backward pass instead of being kept (Chen et al., 2016)."""

    def __str__(self) -> str:
        words = [str(self.slots), *filter(None, [self.kind]), *([_RECOMPUTED] if self.recomputes else [])]
        return " ".join(words)

    @property
    def words(self) -> str:
        """Describe the layout for people."""
        if self.kind:
            return str(self)
        how = "whole" if self.slots == 1 else f"{self.slots} slots a replica"
        return how + (f" {_RECOMPUTED}" if self.recomputes else "")

    @property
    def slots_per_share(self) -> int:
        """Slots that compute one share of a batch together."""
        return self.slots if self.kind == STAGES else 1

    @classmethod
    def from_name(cls, name: str) -> Layout:
        """Return the layout of that name; raise ValueError if there is none."""
        if not isinstance(name, str):
            raise ValueError(f"{name!r:.80} is not a layout; write it like '4 stages' or '2 sharded recomputed'")
        slots, *words = name.split(" ") if name else ("",)
        recomputes = bool(words) and words[-1] == _RECOMPUTED
        kind = words[:-1] if recomputes else words
        if not (slots.isascii() and slots.isdigit() and 1 <= int(slots) <= MOST_SLOTS and len(kind) <= 1):
            raise ValueError(f"{name!r:.80} is not a layout; write it like '4 stages' or '2 sharded recomputed'")
        if kind and kind[0] not in (SHARDED, STAGES):
            raise ValueError(f"{name!r:.80} is not a layout; the kind must be {SHARDED} or {STAGES}")
        found = cls(int(slots), kind[0] if kind else WHOLE, recomputes)
        if str(found) != name:
            raise ValueError(f"{name!r:.80} is not a layout; write it as {str(found)!r}")
        return found
