"""What sites have in common whose slots are given out by agents on a cluster's nodes."""

from __future__ import annotations

from scheduler.slurm.agents import AgentSettings
from scheduler.snapshot import NodeView
from trials.agents.roster import Roster


class AgentSite:
    def __init__(self, agents: AgentSettings) -> None:
        self._agents = agents
        self.roster = Roster()
        self.runs_elsewhere = not agents.shares_files
        self.emulated = agents.emulated

    def environ(self, *, is_shared: bool) -> dict[str, str]:
        """Nothing: replicas have their agent's, which is what this process gave it and what its node adds."""
        return {}

    def nodes(self) -> tuple[NodeView, ...]:
        return self._agents.node_views(self.roster)
