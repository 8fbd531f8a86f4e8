"""What other policies would have done with what is recorded here: a simulation, in a process of its own.

One at a time, at low priority, and only for the owner, as it takes a core for a while.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, HTTPException

from scheduler.api.callers import Client, allow, calling_client
from scheduler.api.service import Service
from scheduler.state_folder import DATABASE

POLICIES = ("goodput", "fair_share", "pollux", "fifo")
LONGEST_SECONDS = 300.0


def what_if_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/page", dependencies=[Depends(calling_client)], tags=["page"])
    found: dict[str, Any] = {"state": "none"}
    tasks: set[asyncio.Task[None]] = set()

    @routes.get("/what-if")
    def state(client: Client) -> dict[str, Any]:
        """Of the last simulation, and what came out."""
        allow(client, read=True)
        return found

    @routes.post("/what-if")
    async def start(client: Client) -> dict[str, Any]:
        """Simulate the recorded trials under other policies."""
        allow(client)
        if found["state"] == "running":
            return found
        folder = service.loop.state_dir
        if not (folder / DATABASE).is_file():
            raise HTTPException(
                409,
                f"what is recorded does not lie in a file of {folder}; `elastune simulate --recorded` takes a folder",
            )
        found.clear()
        found.update(state="running")
        nodes = service.nodes()
        slots = max((node.slots for node in nodes), default=1)
        task = asyncio.create_task(run(folder, len(nodes), slots))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return found

    async def run(folder: Path, nodes: int, slots: int) -> None:
        try:
            found.update(await simulate(folder, nodes, slots))
        except (OSError, ValueError, KeyError, TimeoutError) as error:
            found.update(state="failed", error=f"the simulation did not end well: {error}")

    return routes


async def simulate(folder: Path, nodes: int, slots: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="elastune-what-if-") as scratch:
        results = Path(scratch) / "results.json"
        command = [sys.executable, "-m", "scheduler.cli", "simulate", "--recorded", str(folder), "--live"]
        command += ["--nodes", str(max(1, nodes)), "--slots-per-node", str(slots), "--json", str(results)]
        for policy in POLICIES:
            command += ["--policy", policy]
        process = await asyncio.create_subprocess_exec(
            "nice", "-n", "15", *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            said, complained = await asyncio.wait_for(process.communicate(), LONGEST_SECONDS)
        except BaseException:
            if process.returncode is None:
                process.kill()
            raise
        if process.returncode != 0:
            words = complained.decode(errors="replace").strip().splitlines()
            return {"state": "failed", "error": words[-1] if words else "the simulation ended without a word"}
        ran = next((line for line in said.decode(errors="replace").splitlines() if line.startswith("as it ran")), "")
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
