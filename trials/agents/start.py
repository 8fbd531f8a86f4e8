"""Starts the agent of this machine, as `ELASTUNE_AGENT` describes it; `python -m trials.agents.start`."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tarfile
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dist_core.errors import ControlChannelError
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment
from trials.agents.agent import LEAVE_SECONDS, Agent, agent_slots
from trials.agents.line import AgentLine
from trials.agents.node_files import NodeFiles
from trials.agents.own_slots import address_of, address_towards, emulating, of_one_kind, own_slots
from trials.agents.words import AGENT_VARIABLE, News
from trials.inside.packages import unpack
from trials.launch.fork.start import stages_for, start_fork_server
from trials.launch.gpus import Nvml
from trials.launch.local import LocalLauncher
from trials.launch.slots import numa_nodes, usable_cores

KEPT_OF_QUEUE = (
    "SLURM_CLUSTER_NAME",
    "SLURM_CONF",
    "SLURM_JOB_ACCOUNT",
    "SLURM_JOB_ID",
    "SLURM_JOB_PARTITION",
    "SLURM_TMPDIR",
)
"""Variables of the queue that replicas get. Frameworks take the rest for a world that they are in."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Options of the user's for all agents."""

    preload: str = "torch"
    fork_server: bool = True
    emulate: str | None = None
    slots_per_gpu: int = 1
    gpus_per_slot: int = 1
    interface: str = ""
    """Network interface by whose address replicas find each other; empty: the one that leads to the scheduler."""
    shares_files: bool = True
    """Else its replicas' code comes packed, and what they print and save is sent to the scheduler."""
    leave_seconds: float = LEAVE_SECONDS
    """Longest that replicas get to save when the agent has to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDescription(AgentOptions):
    """Description of an agent: plain JSON in its environment."""

    url: str
    """Address of its scheduler."""
    token: str
    server_file: str = ""
    memory_bytes: int | None = None

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    words = os.environ.pop(AGENT_VARIABLE, "")
    if not words:
        sys.stderr.write(
            f"elastune agent: {AGENT_VARIABLE} is not set; a scheduler starts agents, do not start them by hand\n"
        )
        return 2
    description = AgentDescription(**json.loads(words))
    inherited = replica_environ(os.environ)
    started = None
    if description.fork_server:
        started = start_fork_server(stages_for(description.preload.split(",")), inherited)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    try:
        there = urlsplit(description.url).hostname or ""
        address = address_of(description.interface) if description.interface else address_towards(there)
    except OSError as error:
        sys.stderr.write(f"elastune agent on {host}: {error}\n")
        if started is not None:
            started.close()
        return 2
    gpus = Nvml()
    gpus_here = gpus.gpus()
    if gpus_here and len(gpus_here) < description.gpus_per_slot:
        sys.stderr.write(
            f"elastune agent on {host}: a slot needs {description.gpus_per_slot} GPUs, but this node has "
            f"{len(gpus_here)}\n"
        )
        if started is not None:
            started.close()
        return 2
    slots_here = own_slots(
        host,
        os.environ,
        gpus_here,
        usable_cores(),
        numa_nodes(),
        per_gpu=description.slots_per_gpu,
        gpus_each=description.gpus_per_slot,
    )
    slots = of_one_kind(slots_here) if description.emulate is None else emulating(slots_here, description.emulate)
    launcher = LocalLauncher(
        slots=slots,
        node=host,
        gpus=gpus,
        memory_bytes=description.memory_bytes,
        fork_server=started if started is not None else False,
    )
    server_file = Path(description.server_file) if description.server_file else None
    news = News(
        agent=uuid.uuid4().hex,
        host=host,
        version=1,
        job=own_job(os.environ),
        step=os.environ.get("SLURM_STEP_ID", ""),
        pool=os.environ.get("SLURM_JOB_PARTITION", ""),
        slots=agent_slots(launcher),
        shares_files=not description.shares_files or (server_file is not None and server_file.exists()),
    )
    if description.interface:
        inherited |= {"NCCL_SOCKET_IFNAME": description.interface, "GLOO_SOCKET_IFNAME": description.interface}
    line = AgentLine(description.url, description.token, server_file)
    agent = Agent(
        launcher,
        line,
        news,
        node=host,
        address=address,
        environ=inherited,
        leave_seconds=description.leave_seconds,
        files=None if description.shares_files else NodeFiles(fetch_package, scratch_folder(os.environ), line),
    )
    signal.signal(signal.SIGTERM, lambda *_: agent.leave("its job is being ended"))
    signal.signal(signal.SIGUSR1, lambda *_: agent.leave("its job's time limit is near"))
    signal.signal(signal.SIGUSR2, lambda *_: agent.leave("its scheduler has ended"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logger.info("agent of %s: %d slots, scheduler at %s, replicas at %s", host, len(slots), description.url, address)
    agent.run()
    logger.info("agent of %s has ended", host)
    return 0


def own_job(environ: Mapping[str, str]) -> str:
    """Return the queue's id of the job of this process; empty where it is in none."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def scratch_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the job's scratch folder, where the site gives it one; None for the system's."""
    folder = environ.get("SLURM_TMPDIR", "")
    return Path(folder) if folder and os.path.isdir(folder) else None


def fetch_package(environ: Mapping[str, str], digest: str, folder: Path) -> None:
    """Fetch a package; raise OSError if the scheduler does not hand it out, or it is damaged."""
    environment = ReplicaEnvironment.from_environ(environ)
    assert environment is not None
    try:
        unpack(ControlChannel(environment), digest, folder)
    except (ControlChannelError, tarfile.TarError) as error:
        raise OSError(str(error)) from error


def replica_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of replicas on this machine; of the queue's variables only those that name the job."""
    return {
        name: value
        for name, value in environ.items()
        if name in KEPT_OF_QUEUE or not name.startswith(("SLURM", "SRUN", "PMI", "ELASTUNE_"))
    }


if __name__ == "__main__":
    sys.exit(main())
