"""Errors of an agent, from what it and Slurm have printed into its log."""

from __future__ import annotations

from pathlib import Path

from trials.slurm.commands import said

COMPLAINTS = (
    "error",
    "leaving: ",
    "elastune agent",
    "elastune: ",
    "not found",
    "No such file",
    "No module",
    "CANCELLED",
    "oom",
)
READ_BYTES = 4096


def complaint(log: Path, began: int = 0) -> str:
    """The last lines from the byte ``began`` on that tell of trouble, else the very last one; empty without any."""
    try:
        with open(log, "rb") as file:
            file.seek(began)
            lines = file.read()[-READ_BYTES:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line.partition(" INFO ")[2] or line for line in lines if "lacks support for cpu binding" not in line]
    found = [line for line in lines if any(each in line for each in COMPLAINTS)] or lines[-1:]
    return said("\n".join(found[-2:]))
