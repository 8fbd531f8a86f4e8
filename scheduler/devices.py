"""What this machine offers as slots: its GPUs, else its CPU cores."""

from __future__ import annotations

import os
import shutil
import subprocess


def visible_gpus() -> list[int]:
    """Indices of the NVIDIA GPUs, limited to CUDA_VISIBLE_DEVICES where it is set; empty without a driver."""
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limited is not None:
        return [int(part) for part in limited.split(",") if part.strip().isdigit()]
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in listed.stdout.split() if line.strip().isdigit()]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
