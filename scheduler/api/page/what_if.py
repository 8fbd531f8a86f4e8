"""Simulation of other policies on what is recorded here, in a process of its own.

One at a time, at low priority, and only for the owner, as it takes a core for a while.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, HTTPException

from scheduler.api.client_access import Client, allow, calling_client
from scheduler.api.service import Service
from scheduler.state_folder import DATABASE

POLICIES = ("goodput", "fair_share", "pollux", "fifo")
LONGEST_SECONDS = 300.0


def what_if_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/page", dependencies=[Depends(calling_client)], tags=["page"])
    simulated: dict[str, Any] = {"state": "none"}
    one_at_a_time = threading.Lock()

    @routes.get("/what-if")
    def state(client: Client) -> dict[str, Any]:
        """Return the state of the last simulation, and what came out."""
        allow(client, read=True)
        return simulated

    @routes.post("/what-if")
    def start(client: Client) -> dict[str, Any]:
        """Simulate the recorded trials under other policies."""
        allow(client)
        folder = service.loop.state_dir
        if not (folder / DATABASE).is_file():
            raise HTTPException(
                409,
                f"{folder} has no {DATABASE}: this scheduler keeps its trials elsewhere (--database, or a "
                "Kubernetes cluster), and only the file of a state folder can be simulated",
            )
        with one_at_a_time:
            if simulated["state"] == "running":
                return simulated
            simulated.clear()
            simulated.update(state="running")
        nodes = service.site.nodes()
        slots = max((node.slots for node in nodes), default=1)
        threading.Thread(target=run, args=(folder, len(nodes), slots), name="what-if", daemon=True).start()
        return simulated

    def run(folder: Path, nodes: int, slots: int) -> None:
        try:
            simulated.update(simulate(folder, nodes, slots))
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            simulated.update(state="failed", error=f"the simulation failed: {error}")

    return routes


def simulate(folder: Path, nodes: int, slots: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="elastune-what-if-") as scratch:
        results = Path(scratch) / "results.json"
        command = [sys.executable, "-m", "scheduler.cli", "simulate", "--recorded", str(folder), "--live"]
        command += ["--nodes", str(max(1, nodes)), "--slots-per-node", str(slots), "--json", str(results)]
        for policy in POLICIES:
            command += ["--policy", policy]
        done = subprocess.run(
            ["nice", "-n", "15", *command],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LONGEST_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            words = done.stderr.strip().splitlines()
            return {"state": "failed", "error": words[-1] if words else "the simulation failed without a message"}
        ran = next((line for line in done.stdout.splitlines() if line.startswith("as it ran")), "")
        return {"state": "done", "ran": ran, "policies": [_row(each) for each in json.loads(results.read_text())]}


def _row(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": result["policy"],
        "trials": result["jobs"],
        "makespan_seconds": result["makespan"],
        "mean_completion_seconds": result["mean_completion"],
        "rescales_per_trial": result["rescales_per_job"],
        "slot_hours": result["slot_hours"],
    }
