"""A site whose replicas run under agents on a cluster's nodes, and have their agent's environment."""

from __future__ import annotations

from scheduler.api.site import Site
from scheduler.slurm.agents import AgentSettings
from scheduler.snapshot import NodeView
from trials.agents.roster import Roster
from trials.launch.base import Launcher


class AgentSite(Site):
    roster: Roster

    def __init__(self, agents: AgentSettings, roster: Roster, launcher: Launcher) -> None:
        super().__init__(launcher)
        self._agents = agents
        self.roster = roster
        self.runs_elsewhere = not agents.shares_files
        self.emulated = agents.emulated

    def nodes(self) -> tuple[NodeView, ...]:
        return self._agents.node_views(self.roster)
