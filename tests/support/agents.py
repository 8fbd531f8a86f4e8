"""Agents in threads of the test, whose line to the roster is a call."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from tests.support.waiting import until
from trials.agents.agent import Agent, agent_slots
from trials.agents.line import AgentLine
from trials.agents.node_files import NodeFiles
from trials.agents.roster import Roster
from trials.agents.words import News, Orders
from trials.launch.local import LocalLauncher

_NEWS, _ORDERS = TypeAdapter(News), TypeAdapter(Orders)


class DirectLine(AgentLine):
    """Everything goes through JSON, as on a network."""

    def __init__(self, roster: Roster) -> None:
        super().__init__("http://the-test", "", None)
        self._roster = roster
        self._heard_at = time.monotonic()
        self.is_cut = False

    @property
    def lost_for(self) -> float:
        return time.monotonic() - self._heard_at

    def close(self) -> None:
        """Nothing is open."""

    def send_log(self, replica_id: str, at: int, part: bytes) -> int | None:
        return None if self.is_cut else at + len(part)

    def send_checkpoint(self, trial_id: str, name: str, folder: Path) -> bool | None:
        return None if self.is_cut else True

    def say(self, news: News, heard: int, *, wait: bool) -> Orders | None:
        if self.is_cut:
            return None
        self._heard_at = time.monotonic()
        self._roster.hear(_NEWS.validate_json(json.dumps({**asdict(news), "in_use": sorted(news.in_use)})))
        deadline = time.monotonic() + 1.0
        while wait and self._roster.version(news.agent) == heard and time.monotonic() < deadline:
            time.sleep(0.005)
        return _ORDERS.validate_json(json.dumps(asdict(self._roster.orders(news.agent))))


class AgentInThread:
    """An agent with the slots of a launcher of its own."""

    def __init__(
        self,
        roster: Roster,
        host: str,
        launcher: LocalLauncher,
        environ: Mapping[str, str] | None = None,
        files: NodeFiles | None = None,
    ) -> None:
        self.line = DirectLine(roster)
        self.launcher = launcher
        self.name = f"{host}-{id(self):x}"
        self.agent = Agent(
            launcher,
            self.line,
            News(agent=self.name, host=host, version=1, slots=agent_slots(launcher)),
            node=host,
            address="127.0.0.1",
            environ=environ or {},
            files=files,
        )
        self.thread = threading.Thread(target=self.agent.run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.agent.leave("the test is over")
        self.thread.join(30.0)


def until_there(roster: Roster, hosts: int = 1) -> None:
    until(lambda: len(roster.agents()) >= hosts, 10.0, "an agent has come")
