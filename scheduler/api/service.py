"""Objects that the API's two sides share: store, loop, mailbox, the signal that ends long polls; and their assembly."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler.api.joining import Joining
from scheduler.api.mailbox import Mailbox
from scheduler.api.packages import Packages
from scheduler.api.page.feed import PageFeed
from scheduler.api.page.sessions import Sessions
from scheduler.api.site import Site
from scheduler.api.tokens import Tokens
from scheduler.knowledge.measured import Measuring
from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.settings import LoopSettings
from scheduler.loop.trial_files import PACKAGES
from scheduler.policy import policy_by_name
from trials.errors import StoreUnavailable, UnknownTrial
from trials.store import TrialStore


class Announcements:
    """News by the name of a trial or a study. Used from the event loop only."""

    def __init__(self) -> None:
        self._waited_for: dict[str, asyncio.Event] = {}

    def of(self, name: str) -> asyncio.Event:
        """Set at the next news of it; to be asked for before one looks at what there is."""
        return self._waited_for.setdefault(name, asyncio.Event())

    def tell(self, names: Iterable[str]) -> None:
        for name in names:
            event = self._waited_for.pop(name, None)
            if event is not None:
                event.set()


class Changes:
    """Trials whose replicas have something new to hear, from look to look. One thread."""

    def __init__(self, store: TrialStore) -> None:
        self._store = store
        self._last_versions: Mapping[str, Hashable] = {}

    def look(self) -> set[str]:
        """Return the trials whose replicas have something to hear since the last call.

        Raises StoreUnavailable; the next call then returns them.
        """
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
        before, self._last_versions = self._last_versions, now
        return unheard | {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


@dataclass(slots=True)
class Wish:
    """A trial that people want the driver to run."""

    parameters: Mapping[str, Any]
    parent: int | None
    """Number of the trial whose state it begins with, if any."""
    more_epochs: int
    """Epochs to train beyond those that its code asks for."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""


class Wishes:
    def __init__(self) -> None:
        self._open: dict[str, dict[str, Wish]] = {}

    async def make(self, study: str, wish: Wish, wait_seconds: float) -> str:
        """Have the study's driver run a trial; returns why it will not, empty if it will.

        Raises TimeoutError when it does not answer.
        """
        name = secrets.token_hex(8)
        self._open.setdefault(study, {})[name] = wish
        try:
            await asyncio.wait_for(wish.answered.wait(), wait_seconds)
        finally:
            self._open[study].pop(name)
            if not self._open[study]:
                del self._open[study]
        return wish.refusal

    def open_ones(self, study: str) -> list[dict[str, Any]]:
        return [
            {
                "id": name,
                "parameters": dict(wish.parameters),
                "parent": wish.parent,
                "more_epochs": wish.more_epochs,
            }
            for name, wish in self._open.get(study, {}).items()
            # Whoever asked has not looked at the answer yet.
            if not wish.answered.is_set()
        ]

    def answer(self, study: str, name: str, refusal: str) -> None:
        wish = self._open.get(study, {}).get(name)
        if wish is not None:
            wish.refusal = refusal
            wish.answered.set()


class Service:
    """Objects that the handlers work with."""

    def __init__(
        self,
        store: TrialStore,
        loop: ControlLoop,
        tokens: Tokens,
        site: Site,
        *,
        clock: Callable[[], float] = time.time,
        over: str = "",
    ) -> None:
        self.store = store
        self.loop = loop
        self.tokens = tokens
        self.site = site
        self.clock = clock
        self.over = over
        """Why nothing can be changed: the scheduler has ended, and what it has kept is looked at."""
        self.packages = Packages(loop.state_dir / PACKAGES)
        self.forget: Callable[[Sequence[str]], None] | None = None
        """Has trials that are over forgotten; None where whoever keeps them does that."""
        self.mailbox = Mailbox()
        self.news = Announcements()
        """Tells of single trials' news."""
        self.study_news = Announcements()
        """Tells of news of any trial of a study."""
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.joining = Joining()
        self.measuring = Measuring()
        self.wishes = Wishes()
        self.page = PageFeed()
        self.rendezvous: dict[tuple[str, int | str], dict[str, str]] = {}
        self.sessions = Sessions(tokens, clock)
        self.numbering = threading.Lock()
        """Held from looking for a trial's number until its trial is there."""
        self._changes = Changes(store)
        self._changes_lock = threading.Lock()
        loop.after_look.append(self.announce)

    @property
    def slots(self) -> int:
        """Return the slots that a study can count on: those that exist, or may come to exist."""
        return max(self.site.most_slots, sum(node.slots for node in self.site.nodes()))

    def announce(self) -> None:
        """Let those look again who wait for something that may be there now. Callable from any thread."""
        with self._changes_lock:
            try:
                # Told at each look until they have saved.
                changed = self._changes.look() | self.loop.inheritance.asked.keys()
                studies = self._studies_of(changed)
            except StoreUnavailable:
                return
        if changed and self.event_loop is not None and not self.event_loop.is_closed():
            self.event_loop.call_soon_threadsafe(self.news.tell, changed)
            self.event_loop.call_soon_threadsafe(self.study_news.tell, studies)

    def _studies_of(self, trial_ids: Iterable[str]) -> set[str]:
        studies = set()
        for trial_id in trial_ids:
            with contextlib.suppress(UnknownTrial):
                studies.add(self.store.trial(trial_id).spec.study)
        return studies


def assemble(
    store: TrialStore,
    site: Site,
    tokens: Tokens,
    *,
    policy: str,
    url: str,
    state_dir: Path,
    is_shared: bool = True,
    **of_loop: Any,
) -> Service:
    """Put a scheduler together that replicas reach at ``url``; ``site.begin`` then starts what it gives slots of.

    ``is_shared``: several users' studies run here, so that replicas inherit only what is the machine's. ``of_loop``:
    further ``LoopSettings``.
    """
    clock = SteadyClock()
    settings = LoopSettings(
        state_dir=state_dir,
        api_url=lambda: url,
        replica_token=tokens.for_replica,
        base_environ=site.environ(is_shared=is_shared),
        shares_files=not site.runs_elsewhere,
        one_machine=site.is_one_machine,
        **of_loop,
    )
    loop = ControlLoop(store, site.launcher, policy_by_name(policy), settings, clock=clock)
    site.call_on_change(loop.wake)
    return Service(store, loop, tokens, site, clock=clock)


class SteadyClock:
    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def __call__(self) -> float:
        return self._offset + self._monotonic()
