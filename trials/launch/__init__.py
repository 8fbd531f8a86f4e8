"""Where replicas run: local processes here; other launchers implement the same protocol."""

from trials.launch.base import Launcher, LaunchRequest, NodeSlots, ReplicaProcess
from trials.launch.local import LocalLauncher

__all__ = ["LaunchRequest", "Launcher", "LocalLauncher", "NodeSlots", "ReplicaProcess"]
