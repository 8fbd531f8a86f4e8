"""The replicas of one generation as seen by one of them: rank, world size and the collectives between them.

Gradients travel over ``data`` (NCCL between GPUs, Gloo between CPUs), flags and scalars over ``control`` (always Gloo,
so that reading a flag never synchronises a GPU). For models on CPUs both are one group. Their collectives are issued by
the training thread, in program order, which is the same on all ranks; whoever issues collectives from a thread of its
own asks for groups of its own (``GroupNeeds``).
"""

from __future__ import annotations

import base64
import gc
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dist_core.device import device_of
from dist_core.errors import ControlChannelError, PeerLost
from dist_core.generations.fuse import Fuse
from dist_core.generations.group_needs import GroupNeeds
from dist_core.link.client import ControlChannel
from dist_core.torch_private import (
    HashStore,
    PrefixStore,
    Store,
    build_gloo_group,
    build_nccl_group,
    close_connections,
    close_nccl_group,
    connect_nccl_group,
)

LINGER_SECONDS = 0.5
"""A group that was left keeps its connections that long, so that closing them delays nobody's next step."""
_HERE_ALONE = 2
"""References to what is known here alone: the dictionary's, and the one of whoever asks."""

_left: queue.SimpleQueue[list[dist.ProcessGroup]] = queue.SimpleQueue()
_thread: threading.Thread | None = None
_lock = threading.Lock()


def let_go(groups: Iterable[dist.ProcessGroup]) -> None:
    """End these groups once nobody else knows of them. The same one may come more than once, from any thread."""
    global _thread
    _left.put(list(groups))
    with _lock:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_end_what_is_left, name="elastune-close", daemon=True)
            _thread.start()


def _end_what_is_left() -> None:
    # In this thread's own variables: the interpreter's end waits for none of these groups then.
    groups: dict[int, dist.ProcessGroup] = {}
    while True:
        try:
            arrived = _left.get(timeout=LINGER_SECONDS if groups else None)
        except queue.Empty:
            for key in [key for key in groups if sys.getrefcount(groups[key]) == _HERE_ALONE]:
                del groups[key]
        else:
            groups |= {id(group): group for group in arrived}
            del arrived


# A data loader's worker is a fork of this process. Collecting a process group there, whose threads it does not have,
# ends it with a segmentation fault; so what exists before a fork is left alone after it.
os.register_at_fork(after_in_child=gc.freeze)


@contextmanager
def _naming_a_lost_peer(during: str = "state was handed over") -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"a replica vanished while {during}: {error}") from error


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


class Ended(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroup:
    rank: int
    world_size: int
    num_nodes: int
    data: dist.ProcessGroup
    control: dist.ProcessGroup
    extra: tuple[dist.ProcessGroup, ...] = ()
    within_node: dist.ProcessGroup | None = None
    """None for a replica that is alone on its node, or when nobody asked for it."""
    between_nodes: dist.ProcessGroup | None = None
    """None for all but the first replica of each node, and when there is one node."""
    members: int = 1
    """Processes that a replica consists of, which have ranks in a row."""
    slots_per_share: int = 1
    """Processes that compute one share of a batch together."""
    of_part: ReplicaGroup | None = None
    """Processes of all replicas that hold the same part of the model; None where each holds all of it."""
    fuse: Fuse = field(default_factory=Fuse, compare=False)
    aborted: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set once NCCL was given up: what the device has summed since may be half of a sum."""
    _pieces: dict[str, Ended] = field(default_factory=dict, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def break_off(self) -> None:
        """Let every collective that is under way fail, here and with the others: one of them is gone for good.

        Some would wait for ever otherwise: for one who waits for them, or for data that is never read.
        """
        if self.world_size == 1:
            return
        self._end_pieces()
        self.break_off_nccl()
        over_gloo = self._over_gloo()
        let_go(over_gloo)
        for group in over_gloo:
            close_connections(group)
        self.fuse.blow(over_gloo)

    def break_off_nccl(self) -> None:
        """Let what the device computes go on: a kernel of NCCL's would wait for who is lost. Safe from any thread."""
        groups = self._over_nccl()
        if groups:
            self.aborted.set()
        for group in groups:
            group.abort()
        let_go(groups)

    def connect(self) -> None:
        """Make NCCL's connections now, and not within the first backward pass; collective, between two steps.

        Raises PeerLost. Gloo has made its own when the group was built.
        """
        with _naming_a_lost_peer("connections were made"):
            for group in self._over_nccl():
                connect_nccl_group(group)

    def leave(self) -> None:
        """Leave a group that nobody uses any more; collective, between two steps.

        NCCL's connections end here, in the same order on all replicas: ending some while others are made may hang.
        Gloo's end later, on a thread that is none of theirs.
        """
        self._end_pieces()
        for group in self._over_nccl():
            close_nccl_group(group)
        let_go(self._over_gloo())

    def leave_unused(self) -> None:
        """Let go of a group that nobody here has used."""
        let_go(self.process_groups())

    # ------------------------------------------------------------------ replicas x what a replica consists of

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.members

    @property
    def replica(self) -> int:
        """Number of the replica that this process belongs to."""
        return self.rank // self.members

    @property
    def num_shares(self) -> int:
        """Into so many shares a batch is divided."""
        return self.world_size // self.slots_per_share

    @property
    def share(self) -> int:
        return self.rank // self.slots_per_share

    @property
    def data_parallel(self) -> ReplicaGroup:
        """Return the group with the same state as this process, one of each replica.

        A rank there is its replica's number.
        """
        return self if self.of_part is None else self.of_part

    # ------------------------------------------------------------------ its process groups

    @property
    def has_nccl(self) -> bool:
        return self.data.name() == "nccl"

    @property
    def sums_over_nccl(self) -> bool:
        """Tell whether some gradients are summed where a failure is not reported."""
        return bool(self._over_nccl())

    def _over_gloo(self) -> list[dist.ProcessGroup]:
        return [group for group in self.process_groups() if group.name() == "gloo"]

    def _over_nccl(self) -> list[dist.ProcessGroup]:
        return [group for group in self.process_groups() if group.name() == "nccl"]

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Return each process group once, in the same order on all replicas."""
        of_part = () if self.of_part is None else self.of_part.process_groups()
        several = (
            self.control,
            self.data,
            *self.extra,
            self.within_node,
            self.between_nodes,
            *of_part,
        )
        return list({id(group): group for group in several if group is not None}.values())

    def meets(self, needs: GroupNeeds) -> bool:
        by_node = self.within_node is not None or self.between_nodes is not None
        return (
            self.has_nccl == needs.nccl
            and (self.data is not self.control or not needs.apart)
            and len(self.extra) >= needs.extra
            and (by_node or not needs.by_node)
        )

    def wait(self, work: dist.Work, over: dist.ProcessGroup) -> None:
        """Wait for a collective over one of these groups. Raises RuntimeError when a replica is gone.

        Over NCCL only the device waits, and learns of no loss.
        """
        if over.name() == "gloo":
            self.fuse.wait(work)
        else:
            work.wait()

    def carrying(self, tensors: Sequence[torch.Tensor]) -> dist.ProcessGroup:
        """Return the group over which the thread that trains sends these."""
        on_gpus = self.has_nccl and not any(device_of(tensor).is_host for tensor in tensors)
        return self.data if on_gpus else self.control

    def once(self, name: str, make: Callable[[], Ended]) -> Any:
        """Return this group's one object of that name, made on first use and ended with the group.

        Several models may be reduced in one backward pass: their collectives need one order, and so one thread.
        """
        with self._lock:
            if name not in self._pieces:
                self._pieces[name] = make()
            return self._pieces[name]

    def _end_pieces(self) -> None:
        with self._lock:
            pieces = list(self._pieces.values())
            self._pieces.clear()
        for piece in pieces:
            piece.close()

    def sum_later(self, vector: torch.Tensor) -> dist.Work | None:
        """Start summing a small CPU vector in place over the replicas; None when there is nobody to sum with."""
        if self.world_size == 1:
            return None
        work = self.control.allreduce([vector])
        if self.sums_over_nccl:
            # This thread may read a number that the device computes behind such a kernel, before it looks at the sum.
            work.get_future().add_done_callback(self._break_off_nccl_if_failed)
        return work

    def _break_off_nccl_if_failed(self, summed: torch.futures.Future[Any]) -> None:
        try:
            summed.value()
        except RuntimeError:
            self.break_off_nccl()

    def sum(self, vector: torch.Tensor, *, what: str) -> None:
        """Sum a small CPU vector in place over the replicas. Raises PeerLost, which says ``what`` it held."""
        with _naming_a_lost_peer(f"{what} were summed"):
            work = self.sum_later(vector)
            if work is not None:
                self.fuse.wait(work)

    def sum_of(self, *numbers: float, what: str) -> list[float]:
        """Return the sums of a few numbers over the replicas. Raises PeerLost, which says ``what`` it held."""
        vector = torch.tensor(numbers, dtype=torch.float64)
        self.sum(vector, what=what)
        sums: list[float] = vector.tolist()
        return sums

    def broadcast_tensors(self, tensors: list[torch.Tensor], *, source: int = 0) -> None:
        """Send ``source``'s tensors into everybody's, all in flight at once. Raises PeerLost."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        with _naming_a_lost_peer():
            works = [self.control.broadcast([tensor], options) for tensor in tensors if tensor.numel()]
            for work in works:
                self.fuse.wait(work)

    def send_tensors(self, tensors: list[torch.Tensor], *, targets: Sequence[int]) -> None:
        """Send tensors to each of ``targets``, all in flight at once. Raises PeerLost."""
        with _naming_a_lost_peer():
            works = [
                self.control.send([tensor], target, tag)
                for target in targets
                for tag, tensor in enumerate(tensors)
                if tensor.numel()
            ]
            self.fuse.run(lambda: _wait_for(works))

    def receive_tensors(self, tensors: list[torch.Tensor], *, source: int) -> None:
        """Receive what ``source`` sends into these tensors. Raises PeerLost."""
        with _naming_a_lost_peer():
            works = [self.control.recv([tensor], source, tag) for tag, tensor in enumerate(tensors) if tensor.numel()]
            self.fuse.run(lambda: _wait_for(works))

    def broadcast_json(self, value: Any, *, source: int = 0) -> Any:
        """Send one JSON value from ``source`` to all processes."""
        return json.loads(
            self.broadcast_bytes(json.dumps(value).encode() if self.rank == source else b"", source=source)
        )

    def broadcast_bytes(self, content: bytes, *, source: int = 0) -> bytes:
        if self.world_size == 1:
            return content
        length = torch.tensor([len(content)], dtype=torch.int64)
        self.broadcast_tensors([length], source=source)
        payload = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source:
            payload.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.broadcast_tensors([payload], source=source)
        return payload.numpy().tobytes()

    def gather_json(self, value: Any) -> list[Any]:
        """Everybody's JSON value, in rank order."""
        return [self.broadcast_json(value, source=rank) for rank in range(self.world_size)]


def build_group(
    store: Store,
    *,
    name: str,
    rank: int,
    nodes: Sequence[str],
    timeout: timedelta,
    host: str = "127.0.0.1",
    needs: GroupNeeds | None = None,
) -> ReplicaGroup:
    """Connect the members of a generation, one on each of ``nodes`` in rank order; blocks until all have come.

    Raises RuntimeError when some did not within ``timeout``.
    """
    world_size = len(nodes)
    needs = needs or GroupNeeds()

    def gloo(kind: str, rank: int, size: int) -> dist.ProcessGroup:
        prefixed = PrefixStore(f"{name}/{kind}", store)
        return build_gloo_group(prefixed, rank=rank, world_size=size, timeout=timeout, name=f"{name}-{kind}", host=host)

    def fast(kind: str, rank: int, size: int) -> dist.ProcessGroup:
        if not needs.nccl or world_size == 1:
            return gloo(kind, rank, size)
        prefixed = PrefixStore(f"{name}/{kind}", store)
        return build_nccl_group(prefixed, rank=rank, world_size=size, timeout=timeout, name=f"{name}-{kind}")

    control = gloo("control", rank, world_size)
    local = [index for index, node in enumerate(nodes) if node == nodes[rank]]
    leaders = sorted({nodes.index(node) for node in nodes})
    within = between = None
    if needs.by_node and len(local) > 1:
        within = fast(f"within-{local[0]}", local.index(rank), len(local))
    if needs.by_node and len(leaders) > 1 and rank in leaders:
        between = fast("between", leaders.index(rank), len(leaders))
    whole = ReplicaGroup(
        rank=rank,
        world_size=world_size,
        num_nodes=len(leaders),
        data=fast("data", rank, world_size) if needs.apart and world_size > 1 else control,
        control=control,
        extra=tuple(fast(f"extra-{index}", rank, world_size) for index in range(needs.extra)),
        within_node=within,
        between_nodes=between,
    )
    if needs.members == 1 or world_size % needs.members:
        # A process alone, which has not come to the others of its replica's generation.
        return whole
    member = rank % needs.members
    data_parallel = build_group(
        store,
        name=f"{name}/part-{member}",
        rank=rank // needs.members,
        nodes=nodes[member :: needs.members],
        timeout=timeout,
        host=host,
        needs=GroupNeeds(carriers=needs.of_parts),
    )
    return consisting_of(whole, data_parallel, needs)


def consisting_of(whole: ReplicaGroup, data_parallel: ReplicaGroup, needs: GroupNeeds) -> ReplicaGroup:
    """Return the group of replicas of several processes; what breaks one of the two off breaks both."""
    data_parallel = replace(data_parallel, fuse=whole.fuse, aborted=whole.aborted)
    return replace(whole, members=needs.members, slots_per_share=needs.slots_per_share, of_part=data_parallel)


def lone_group(needs: GroupNeeds | None = None) -> ReplicaGroup:
    """Return a group of one: a standalone process, or a joiner that has not joined yet."""
    return build_group(HashStore(), name="lone", rank=0, nodes=("here",), timeout=timedelta(seconds=30), needs=needs)


POLL_SECONDS = 10.0


class AddressStore(Store):
    """Keys of one meeting: of a generation, or of the processes of a replica.

    ``cancel`` makes every waiting call raise, so that an abandoned group can be dropped.
    """

    def __init__(self, channel: ControlChannel, meeting: Mapping[str, int | str], timeout: timedelta) -> None:
        super().__init__()
        self._channel = channel
        self._meeting = dict(meeting)
        self._called = " ".join(f"{name} {value}" for name, value in meeting.items())
        self._timeout = timeout
        self._known: dict[str, bytes] = {}
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else value
        body = {**self._meeting, "key": key, "value": base64.b64encode(data).decode()}
        self._channel.request("PUT", "/rendezvous", body)
        self._known[key] = data

    def get(self, key: str) -> bytes:
        if key not in self._known:
            waited = 0.0
            while key not in self._known:
                if self._cancelled.is_set():
                    raise ControlChannelError(f"{self._called} was abandoned")
                if waited >= self._timeout.total_seconds():
                    raise TimeoutError(f"no replica published {key!r} of {self._called}")
                answer = self._channel.request(
                    "GET",
                    "/rendezvous",
                    params={**self._meeting, "key": key, "wait": POLL_SECONDS},
                )
                waited += POLL_SECONDS
                if answer["value"] is not None:
                    found = {**answer.get("beside", {}), key: answer["value"]}
                    self._known |= {name: base64.b64decode(value) for name, value in found.items()}
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)
