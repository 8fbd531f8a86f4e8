"""What the API's two sides share: store, loop, mailbox, and the signal that ends long polls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler.api.announcements import Announcements, Changes
from scheduler.api.joining import Joining
from scheduler.api.mailbox import Mailbox
from scheduler.api.packages import Packages
from scheduler.api.page.feed import PageFeed
from scheduler.api.page.sessions import Sessions
from scheduler.api.tokens import OthersTokens, Tokens
from scheduler.api.wishes import Wishes
from scheduler.knowledge.measured import Measuring
from scheduler.loop.control_loop import ControlLoop
from scheduler.snapshot import JobView, NodeView
from trials.agents.roster import Roster
from trials.errors import StoreUnavailable
from trials.store import TrialStore


@dataclass
class Service:
    """What the handlers work with.

    ``changed`` is replaced and set whenever the control loop has looked at things, for the few who look at many trials;
    ``news`` tells of single ones.
    """

    store: TrialStore
    loop: ControlLoop
    tokens: Tokens
    nodes: Callable[[], tuple[NodeView, ...]]
    mailbox: Mailbox = field(default_factory=Mailbox)
    news: Announcements = field(default_factory=Announcements)
    joining: Joining = field(default_factory=Joining)
    measuring: Measuring = field(default_factory=Measuring)
    wishes: Wishes = field(default_factory=Wishes)
    page: PageFeed = field(default_factory=PageFeed)
    rendezvous: dict[tuple[str, int | str], dict[str, str]] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    event_loop: asyncio.AbstractEventLoop | None = None
    packages: Packages | None = None
    """Where sweeps' working folders are kept; None where replicas run on the machine that sweeps are started on."""
    emulated: str = ""
    """A sentence for every output where slots stand for devices that are not there."""
    namespaces: tuple[str, ...] = ()
    """Where, beside its own, studies may be on a cluster: their names begin with the namespace and a dot."""
    others_tokens: OthersTokens | None = None
    """Those that replicas show beside our own, where the cluster gives them out."""
    forget: Callable[[Sequence[str]], None] | None = None
    """Has trials that are over forgotten; None where whoever keeps them does that."""
    over: str = ""
    """Why nothing can be changed: the scheduler has ended, and what it has kept is looked at."""
    roster: Roster | None = None
    """The agents that run replicas on other nodes, where there are such."""
    grows: bool = False
    """Whether the cluster may get more slots than it has now."""

    queue: Callable[[], tuple[JobView, ...]] = tuple
    """Jobs with which slots come, where a queue gives them."""
    queue_trouble: Callable[[], str] = str
    """Why no more of them are asked for, for people."""
    held_hours: Callable[[], float | None] = lambda: None
    """Slot hours that such jobs have been there for."""
    most_slots: int = 0
    """So many it may have then, as far as that is known."""

    @property
    def slots(self) -> int:
        """What a study can count on: those that there are, or may come to be."""
        return max(self.most_slots, sum(node.slots for node in self.nodes()))

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.tokens, self.clock)
        self._changes = Changes(self.store)
        self._looking = threading.Lock()
        self.numbering = threading.Lock()
        """Held from looking for a trial's number until its trial is there."""

    def announce(self) -> None:
        """Let those look again who wait for something that may be there now. Callable from any thread."""
        with self._looking:
            try:
                changed = self._changes.look()
            except StoreUnavailable:
                changed = set()
        if self.event_loop is not None and not self.event_loop.is_closed():
            self.event_loop.call_soon_threadsafe(self._announce, changed)

    def _announce(self, trial_ids: set[str]) -> None:
        self.news.tell(trial_ids)
        self.changed.set()
        self.changed = asyncio.Event()
