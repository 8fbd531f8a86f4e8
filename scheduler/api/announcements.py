"""Wakes those who wait for news of a trial when there are some, and nobody else.

With hundreds of replicas on long polls it matters that the ones of a trial to which nothing happened sleep on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Mapping

from trials.store import TrialStore


class Announcements:
    """Used from the event loop only."""

    def __init__(self) -> None:
        self._waited_for: dict[str, asyncio.Event] = {}

    def of(self, trial_id: str) -> asyncio.Event:
        """Set at the next news of the trial; to be asked for before one looks at what there is."""
        return self._waited_for.setdefault(trial_id, asyncio.Event())

    def tell(self, trial_ids: Iterable[str]) -> None:
        for trial_id in trial_ids:
            event = self._waited_for.pop(trial_id, None)
            if event is not None:
                event.set()


class Changes:
    """Which trials' replicas have something new to hear, from look to look. One thread."""

    def __init__(self, store: TrialStore) -> None:
        self._store = store
        self._seen: Mapping[str, Hashable] = {}

    def look(self) -> set[str]:
        """Raises StoreUnavailable; what was not told then is told at the next look."""
        replicas: dict[str, list[Hashable]] = {}
        # Heard, aimed and told again between two looks, a joiner looks the same in both: it is told until it has heard.
        unheard: set[str] = set()
        for replica in self._store.replicas():
            replicas.setdefault(replica.trial_id, []).append(replica.replica_id)
            if replica.retry_join:
                unheard.add(replica.trial_id)
        # A replica of a trial that is over may wait still, in a process that goes on: it hears that it is gone.
        now: dict[str, Hashable] = {trial_id: tuple(rows) for trial_id, rows in replicas.items()}
        now |= {
            trial.trial_id: (
                trial.generation,
                trial.members,
                trial.published,
                trial.published_members,
                tuple(replicas.get(trial.trial_id, ())),
            )
            for trial in self._store.trials(live_only=True)
        }
        before, self._seen = self._seen, now
        return unheard | {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
