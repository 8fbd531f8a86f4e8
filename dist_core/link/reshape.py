"""Reshape: the replicas in which a trial goes on with another layout, out of processes that train and some new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape:
    number: int
    """Of the generation in which the old replicas end: what belongs to it goes by this number."""
    layout: str
    """How replicas are to hold the model (``dist_core.layout``)."""
    holders: tuple[str, ...]
    """Ids of the processes, each with its part, that have the trial's state for all: those of its first replica."""
    replicas: tuple[tuple[str, ...], ...]
    """Ids of the processes that each replica is to consist of, in order."""

    @property
    def name(self) -> str:
        """Under which its processes find each other."""
        return f"{self.holders[0]}.{self.number}"

    @property
    def processes(self) -> tuple[str, ...]:
        """In the order of their future ranks."""
        return tuple(each for replica in self.replicas for each in replica)

    def identity_of(self, environment: ReplicaEnvironment) -> ReplicaEnvironment | None:
        """What this process is in it, None for one that is no longer wanted."""
        for number, replica in enumerate(self.replicas):
            if environment.replica_id in replica:
                member = replica.index(environment.replica_id)
                return replace(
                    environment,
                    launch_index=number * len(replica) + member,
                    replicas=len(self.processes),
                    members=len(replica),
                    member=member,
                    whole=f"{replica[0]}.{self.number}",
                    layout=self.layout,
                    reshape=self.name,
                    holders=len(self.holders),
                )
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "layout": self.layout,
            "holders": list(self.holders),
            "replicas": [list(replica) for replica in self.replicas],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Reshape:
        return cls(
            number=document["number"],
            layout=document["layout"],
            holders=tuple(document["holders"]),
            replicas=tuple(tuple(replica) for replica in document["replicas"]),
        )


def first_of(name: str) -> str:
    """Id of the process that a replica, or a reshape, is named by."""
    return name.partition(".")[0]


def number_of(name: str) -> int:
    """Of the reshape of that name."""
    return int(name.rpartition(".")[2])


def stand_by(channel: ControlChannel | None, environment: ReplicaEnvironment) -> None:
    """Say that this process waits for the others, where it is one that a trial is to go on with."""
    if environment.reshape and channel is not None:
        channel.request("POST", "/standing-by")
