"""Launchers of replicas: local processes here; others implement the same protocol."""

from trials.launch.base import Launcher, LaunchRequest, NodeSlots, ReplicaProcess
from trials.launch.local import LocalLauncher
from trials.launch.memory import InMemoryLauncher

__all__ = ["InMemoryLauncher", "LaunchRequest", "Launcher", "LocalLauncher", "NodeSlots", "ReplicaProcess"]
