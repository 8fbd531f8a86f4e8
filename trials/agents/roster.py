"""Roster: which agents there are, what each has said last, and what it is to do.

Agents of one host make one node. Their slots are numbered within it; a number stays an agent's as long as it lives, and
one of an agent that is gone is nobody's until the next one takes it. What a node's agents have said survives neither
them nor this process: agents say all that they know with every message, and keep their numbers.

Concurrency: the control loop's thread and the API's threads call; a lock holds them apart.
"""

from __future__ import annotations

import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trials.agents.words import AgentReplica, News, Orders, Phase
from trials.launch.base import NodeSlots
from trials.record import ReplicaRecord

QUIET_SECONDS = 15.0
"""An agent says something every few seconds; nothing new is started with one that has not for so long."""
LOST_SECONDS = 40.0
"""One that has said nothing for so long is gone, and its replicas with it."""
DEAF_SECONDS = 5.0
"""Between two looks: longer, and this process itself was held up."""
REMEMBERED_SECONDS = 600.0
"""Seconds for which a replica that was believed to be gone is known to be unwanted, should it turn up again."""
HUNG_UP_SECONDS = 4.0
"""The same of one that has closed its line: if it lives, it calls again at once."""
RETURN_SECONDS = 45.0
"""After a start of this process: by then agents that were there before have called."""


@dataclass(slots=True)
class _Agent:
    news: News
    numbers: tuple[int, ...]
    seen_at: float
    hung_up_at: float | None = None
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    """CPU time that each of its replicas has used."""
    launches: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Replicas that it was told to start and has not said a word of."""
    stops: dict[str, bool] = field(default_factory=dict)
    noted: set[str] = field(default_factory=set)
    dismissed: str = ""
    """Why it is not wanted any more."""
    is_crowded: bool = False
    """Another one had its numbers when it came back: nothing new is started with it while it has replicas."""
    version: int = 1
    """Version of its orders."""


@dataclass(frozen=True, slots=True)
class Lost:
    """An agent is gone; why, for people."""

    why: str
    at: float = 0.0
    """Time at which that was believed."""


class Roster:
    """Agents that call, and what each of them is to do.

    ``on_news``: called, from any thread, when an agent has said something new. ``on_orders``: called with the
    name of an agent that has something to do.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.on_news: Callable[[], None] = lambda: None
        self.on_orders: Callable[[str], None] = lambda agent: None
        self._name = uuid.uuid4().hex
        self._monotonic = monotonic
        self._began = monotonic()
        self._agents: dict[str, _Agent] = {}
        self._looked_at = self._began
        self._losses: dict[str, Lost] = {}
        """Reason why each replica is gone without its agent's word."""
        self._expected: dict[str, dict[int, str]] = {}
        """Replicas on each node's slots from before this process began."""
        self._lock = threading.RLock()

    # ------------------------------------------------------------------ what agents say

    def hear(self, news: News) -> None:
        """Take an agent's news; raise ValueError for news that cannot be."""
        with self._lock:
            agent = self._agents.get(news.agent)
            if agent is None:
                agent = self._agents[news.agent] = _Agent(news, (), self._monotonic())
                self._give_numbers(agent)
                changed = True
            else:
                changed = news.version > agent.news.version
                agent.seen_at, agent.hung_up_at = self._monotonic(), None
                if changed:
                    agent.news = news
            agent.cpu_seconds = news.cpu_seconds
            for replica_id in agent.news.replicas.keys() & agent.launches.keys():
                del agent.launches[replica_id]
            agent.noted &= agent.news.replicas.keys()
            waiting = self._expected.get(news.host, {})
            for number in [number for number, replica_id in waiting.items() if replica_id in news.replicas]:
                del waiting[number]
        if changed:
            self.on_news()

    def _give_numbers(self, agent: _Agent) -> None:
        """Give slots the numbers they had, unless others have them now; otherwise the lowest that are free."""
        news = agent.news
        others = [each for each in self._agents.values() if each.news.host == news.host and each is not agent]
        known = len(set(news.numbers)) == len(news.slots) and min(news.numbers, default=-1) >= 0
        if known:
            for other in others:
                if not set(other.numbers).isdisjoint(news.numbers) and not other.launches and not other.news.replicas:
                    # It has nothing there yet, while the one that comes back may have replicas on them.
                    other.numbers = ()
            taken = {number for each in others for number in each.numbers}
            if taken.isdisjoint(news.numbers):
                agent.numbers = news.numbers
            agent.is_crowded = not agent.numbers
        for each in (agent, *others):
            if not each.numbers:
                each.numbers = self._free_numbers(each)
                each.version += 1

    def _free_numbers(self, agent: _Agent) -> tuple[int, ...]:
        host = agent.news.host
        taken = {number for each in self._agents.values() if each.news.host == host for number in each.numbers}
        taken |= self._expected.get(host, {}).keys()
        free = (number for number in range(len(taken) + len(agent.news.slots)) if number not in taken)
        return tuple(number for number, _ in zip(free, agent.news.slots, strict=False))

    def orders(self, agent_name: str) -> Orders:
        with self._lock:
            agent = self._agents.get(agent_name)
            if agent is None:
                return Orders(roster=self._name)
            replicas = agent.news.replicas
            return Orders(
                roster=self._name,
                version=agent.version,
                numbers=agent.numbers,
                launch=tuple(agent.launches.values()),
                stop={
                    name: force
                    for name, force in agent.stops.items()
                    if name in agent.launches or (name in replicas and not replicas[name].is_over)
                },
                noted=tuple(sorted(agent.noted)),
                end=agent.dismissed,
            )

    def version(self, agent_name: str) -> int:
        """Return the version of an agent's orders; 0 where there is no such agent."""
        agent = self._agents.get(agent_name)
        return 0 if agent is None else agent.version

    def _tell(self, *names: str) -> None:
        """Tell these agents that they have something more to do."""
        with self._lock:
            for name in names:
                if name in self._agents:
                    self._agents[name].version += 1
        for name in names:
            self.on_orders(name)

    # ------------------------------------------------------------------ who is there

    def expect(self, replicas: Sequence[ReplicaRecord]) -> None:
        """Expect replicas that agents had before this process began.

        Their nodes stay until it is clear that none comes.
        """
        with self._lock:
            for replica in replicas:
                self._expected.setdefault(replica.node, {})[replica.slot] = replica.replica_id

    def agents(self) -> list[News]:
        with self._lock:
            return [agent.news for agent in self._agents.values()]

    def quiet_for(self, agent_name: str) -> float:
        """Seconds since the agent has called; infinite where there is no such agent."""
        agent = self._agents.get(agent_name)
        return math.inf if agent is None else self._monotonic() - agent.seen_at

    def nodes(self) -> list[NodeSlots]:
        """Slots that no agent has any more, or whose agent is quiet or leaves, count as in use."""
        now = self._monotonic()
        with self._lock:
            open_slots: dict[str, set[int]] = {}
            most: dict[str, int] = {}
            kinds: dict[str, str] = {}
            jobs: dict[str, dict[int, str]] = {}
            for agent in self._agents.values():
                host = agent.news.host
                most[host] = max(most.get(host, 0), *(number + 1 for number in agent.numbers))
                closed = self._is_closed(agent, now)
                free = [] if closed else [n for at, n in enumerate(agent.numbers) if at not in agent.news.in_use]
                open_slots.setdefault(host, set()).update(free)
                kinds[host] = agent.news.slots[0].kind
                jobs.setdefault(host, {}).update(dict.fromkeys(agent.numbers, agent.news.job))
            if now - self._began < RETURN_SECONDS:
                for host, slots in self._expected.items():
                    if slots:
                        most[host] = max(most.get(host, 0), *(number + 1 for number in slots))
            return [
                NodeSlots(
                    node=host,
                    slots=most[host],
                    kind=kinds.get(host, ""),
                    jobs=jobs.get(host, {}),
                    in_use=frozenset(range(most[host])) - open_slots.get(host, set()),
                )
                for host in sorted(most, key=_in_order)
            ]

    def _is_closed(self, agent: _Agent, now: float) -> bool:
        """Tell whether nothing new is started with it."""
        news = agent.news
        alive = {name for name, state in news.replicas.items() if not state.is_over}
        return bool(
            news.leaves
            or agent.dismissed
            or not news.shares_files
            or now - agent.seen_at > QUIET_SECONDS
            # What was believed to be gone still works there.
            or not alive.isdisjoint(self._losses)
            or (agent.is_crowded and alive)
        )

    def _agent_at(self, node: str, number: int) -> str | None:
        return next(
            (name for name, agent in self._agents.items() if agent.news.host == node and number in agent.numbers), None
        )

    def slot_environ(self, node: str, number: int) -> Mapping[str, str]:
        with self._lock:
            name = self._agent_at(node, number)
            if name is None:
                return {}
            agent = self._agents[name]
            return agent.news.slots[agent.numbers.index(number)].environ

    # ------------------------------------------------------------------ replicas

    def order(self, node: str, number: int, replica_id: str, document: Mapping[str, Any]) -> bool:
        """Have the agent of that slot start a replica; False where there is none that would."""
        with self._lock:
            name = self._agent_at(node, number)
            if name is None or self._is_closed(self._agents[name], self._monotonic()):
                return False
            self._agents[name].launches[replica_id] = document
        self._tell(name)
        return True

    def state_of(self, replica_id: str) -> AgentReplica | Lost | None:
        """Return what is known of a replica; None where nobody says a word of it."""
        with self._lock:
            for agent in self._agents.values():
                found = agent.news.replicas.get(replica_id)
                if found is not None:
                    return found
                if replica_id in agent.launches:
                    return AgentReplica(phase=Phase.STARTING)
            lost = self._losses.get(replica_id)
            if lost is not None:
                return lost
            waits = any(replica_id in slots.values() for slots in self._expected.values())
            if waits and self._monotonic() - self._began < RETURN_SECONDS:
                return AgentReplica(phase=Phase.STARTING)
            return None

    def cpu_seconds(self, replica_id: str) -> float | None:
        """CPU time that a replica had used when its agent called last; None where no agent has said."""
        with self._lock:
            for agent in self._agents.values():
                if replica_id in agent.cpu_seconds:
                    return agent.cpu_seconds[replica_id]
        return None

    def running(self) -> dict[str, str]:
        """Replicas that run or are about to, with the agents that have them."""
        with self._lock:
            return {
                replica_id: name
                for name, agent in self._agents.items()
                for replica_id in (
                    *agent.launches,
                    *(each for each, state in agent.news.replicas.items() if not state.is_over),
                )
            }

    def end_lost(self) -> None:
        """End replicas that were believed to be gone, and whose agents have come back with them."""
        for replica_id in self.running().keys() & self._losses.keys():
            self.stop(replica_id, force=True)

    def stop(self, replica_id: str, *, force: bool) -> None:
        with self._lock:
            agent_name = None
            for name, agent in self._agents.items():
                if replica_id in agent.news.replicas or replica_id in agent.launches:
                    if agent.stops.get(replica_id, False) or (replica_id in agent.stops and not force):
                        return
                    agent.stops[replica_id] = force
                    agent_name = name
        if agent_name is not None:
            self._tell(agent_name)

    def note_ends(self, live: Sequence[str]) -> None:
        """Note ends; ``live``: replicas that have not ended as far as the scheduler knows, others need not be told."""
        alive = set(live)
        agent_names = []
        with self._lock:
            for name, agent in self._agents.items():
                over = {each for each, state in agent.news.replicas.items() if state.is_over} - alive
                if over - agent.noted:
                    agent.noted |= over
                    agent_names.append(name)
                for replica_id in agent.stops.keys() - agent.news.replicas.keys() - agent.launches.keys():
                    del agent.stops[replica_id]
            self._forget_losses(alive)
        self._tell(*agent_names)

    def _forget_losses(self, alive: set[str]) -> None:
        """Forget noted losses after a while: their agents may come back with them."""
        now = self._monotonic()
        for replica_id in [name for name in self._losses if name not in alive]:
            if now - self._losses[replica_id].at > REMEMBERED_SECONDS:
                del self._losses[replica_id]

    # ------------------------------------------------------------------ agents that go

    def lose(self, agent_name: str, why: str) -> None:
        """Note that an agent is gone, and with it whatever it had."""
        with self._lock:
            agent = self._agents.pop(agent_name, None)
            if agent is None:
                return
            # Also those that have ended, where their last words came too late for anybody to read.
            told = {each for each, state in agent.news.replicas.items() if state.is_over} & agent.noted
            for replica_id in (agent.news.replicas.keys() | agent.launches.keys()) - told:
                self._losses[replica_id] = Lost(why, self._monotonic())
        self.on_news()

    def lose_silent(self) -> None:
        """Note the loss of agents that have said nothing for too long."""
        now = self._monotonic()
        with self._lock:
            if now - self._looked_at > DEAF_SECONDS:
                # It is this process that was away, and could hear nobody.
                for agent in self._agents.values():
                    agent.seen_at, agent.hung_up_at = now, None
            self._looked_at = now
            silent = {
                name: _end_of(agent.news, now - agent.seen_at)
                for name, agent in self._agents.items()
                if now - agent.seen_at > LOST_SECONDS
                or (agent.hung_up_at is not None and now - agent.hung_up_at > HUNG_UP_SECONDS)
            }
        for name, why in silent.items():
            self.lose(name, why)

    def note_hung_up(self, agent_name: str, waited_since: float) -> None:
        """Note that an agent has closed a line on which it had waited for orders since then."""
        with self._lock:
            agent = self._agents.get(agent_name)
            if agent is not None and agent.seen_at <= waited_since:
                agent.hung_up_at = self._monotonic()

    @property
    def all_have_left(self) -> bool:
        """Tell whether every agent that calls has nothing left, and is about to end."""
        with self._lock:
            return all(
                agent.news.leaves and all(state.is_over for state in agent.news.replicas.values())
                for agent in self._agents.values()
            )

    def dismiss_all(self, patience_seconds: float) -> None:
        """Have every agent's replicas save and leave, and wait for that."""
        self.dismiss("its scheduler has ended")
        deadline = self._monotonic() + patience_seconds
        while not self.all_have_left and self._monotonic() < deadline:
            time.sleep(0.05)

    def dismiss(self, why: str, agent_name: str | None = None) -> None:
        """Dismiss that agent, or every one."""
        with self._lock:
            names = [name for name in self._agents if agent_name in (None, name)]
            for name in names:
                self._agents[name].dismissed = why
        self._tell(*names)


def _end_of(news: News, seconds: float) -> str:
    """Why an agent is taken to be gone, for people."""
    of_job = f" of job {news.job}" if news.job else ""
    if news.leaves:
        return f"the agent of {news.host}{of_job} has ended: {news.leaves}"
    return f"the agent of {news.host}{of_job} has not called for {seconds:.0f} s"


def _in_order(host: str) -> list[tuple[int, str]]:
    """Sort key for names with numbers, as people count: n2 comes before n10."""
    parts = re.findall(r"\d+|\D+", host)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
