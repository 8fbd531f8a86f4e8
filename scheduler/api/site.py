"""Site: where the slots are that a scheduler gives out, and what runs replicas on them."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.api.tokens import OthersTokens
from scheduler.loop.control_loop import ControlLoop
from scheduler.snapshot import NodeView
from trials.agents.roster import Roster
from trials.launch.base import Launcher
from trials.record import WaitingJob
from trials.store import TrialStore


class Site:
    """Slots that are there from the start, on this machine. Other sites override what differs."""

    roster: Roster | None = None
    """Agents that run replicas on other nodes and call the scheduler."""
    grows = False
    """True if the site may get more slots than it has now."""
    is_one_machine = False
    """True if all replicas run on the scheduler's machine."""
    runs_elsewhere = False
    """True if replicas share no files with this machine, so that code has to be brought to them."""
    most_slots = 0
    """Slots that may come to be at a time; 0 where it is what there is."""
    emulated = ""
    """A sentence for every output where slots stand for devices that are not there."""
    namespaces: tuple[str, ...] = ()
    """Namespaces, beside the scheduler's own, that studies may be in; their names begin with it and a dot."""
    others_tokens: OthersTokens | None = None
    """Tokens that the cluster gives to replicas, where it does."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def environ(self, *, is_shared: bool) -> dict[str, str]:
        """Return what replicas inherit of this process's environment."""
        return {}

    def nodes(self) -> tuple[NodeView, ...]:
        return tuple(NodeView(name=node.node, slots=node.slots, kind=node.kind) for node in self.launcher.nodes())

    def queue(self) -> tuple[WaitingJob, ...]:
        """Return the jobs with which slots come, where a queue gives them."""
        return ()

    def held_hours(self) -> float | None:
        """Return the slot hours that such jobs have been there for; None where there are none."""
        return None

    def queue_trouble(self) -> str:
        """Return a sentence that says why no more jobs are asked for."""
        return ""

    def call_on_change(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when the loop had better look."""

    def begin(self, store: TrialStore, loop: ControlLoop, url: str, agents_token: str) -> None:
        """Begin: the scheduler is about to answer at this address."""

    def wait_until_there(self) -> None:
        """Wait for the first slots. Raises SchedulerError where they do not come."""

    def drain(self) -> None:
        """Have what cannot run on without the scheduler save and leave, while the scheduler still answers."""
