"""ElasticEnvironment: what Lightning asks its cluster, answered by the trial."""

from __future__ import annotations

import os

from dist_core.lightning.package import ClusterEnvironment
from dist_core.trial.current import get_core


class ElasticEnvironment(ClusterEnvironment):
    """Replicas are started by whoever runs the trial, and Lightning connects none of them."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return get_core().environment is not None

    def world_size(self) -> int:
        """1: what replicas do together is the trial's."""
        return 1

    def set_world_size(self, size: int) -> None:
        """Do nothing: the scheduler sets the world size."""

    def global_rank(self) -> int:
        return get_core().shown_rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the trial sets the rank."""

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return 0
