"""A group whose collectives can be broken off: with peers that do not come, and with data that nobody reads."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from dist_core.errors import PeerLost
from dist_core.generations.process_groups import ReplicaGroup, build_group
from tests.support.ranks import run_ranks
from tests.support.waiting import until

LARGE = 50_000_000
"""Of which a part is on its way for long enough to do something meanwhile."""


def connected() -> tuple[ReplicaGroup, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: Any = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size)  # type: ignore[attr-defined]  # public, and missing from its stubs
    group = build_group(store, name="g", rank=rank, nodes=("here",) * size, timeout=timedelta(minutes=5))
    return group, store


def waits_for_one_who_does_not_come() -> float:
    """Rank 2 takes part in nothing; the others wait for it, and rank 0 breaks off."""
    group, _store = connected()
    began = time.monotonic()
    if group.rank == 2:
        time.sleep(1.0)
    elif group.rank == 0:
        threading.Timer(0.2, group.break_off).start()
    with pytest.raises(PeerLost):
        group.sum(torch.zeros(4), what="numbers")
    return time.monotonic() - began


def test_what_is_broken_off_fails_with_everybody() -> None:
    seconds = run_ranks(waits_for_one_who_does_not_come, 3)
    assert max(seconds) < 10.0


def leaves_while_its_thread_tells_of_the_loss() -> bool:
    """The last who knows of the group is then a thread of the group's own, which cannot wait for itself to end."""
    group, store = connected()
    if group.rank == 1:
        store.get("waited for")
        os._exit(0)
    told = threading.Event()

    def slowly(_: object) -> None:
        told.set()
        time.sleep(0.2)

    settled = group.fuse.settled(group.control.allreduce([torch.zeros(4)]).get_future())
    settled.add_done_callback(slowly)
    store.set("waited for", "")
    assert told.wait(30.0)
    threads = set(psutil.Process().threads())
    group.break_off()
    del group, settled
    return until(lambda: len(psutil.Process().threads()) < len(threads), 30.0, "its thread ends")


def test_a_group_is_not_let_go_by_a_thread_of_its_own() -> None:
    [has_let_go, _] = run_ranks(leaves_while_its_thread_tells_of_the_loss, 2, dies=1)
    assert has_let_go


def has_data_that_nobody_reads() -> float:
    """An operation fails while its data is arriving: gloo reads no more of that connection, nor that it was closed."""
    group, store = connected()
    gloo = group.control
    if group.rank == 1:
        store.get("receiving")
        sent = gloo.send([torch.zeros(LARGE)], 0, 1)
        store.set("sent", "")
        store.get("dropped")
        del sent
        os._exit(0)
    failed = gloo.recv([torch.zeros(LARGE)], 1, 1)
    waits = gloo.recv([torch.zeros(1)], 1, 2)
    store.set("receiving", "")
    time.sleep(0.005)
    del failed
    store.set("dropped", "")
    # What is broken off before is not sent at all, and rank 1 says so.
    store.get("sent")
    threading.Timer(0.5, group.break_off).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        waits.wait()
    return time.monotonic() - began


def test_a_connection_that_nobody_reads_is_closed_too() -> None:
    [seconds, _] = run_ranks(has_data_that_nobody_reads, 2, dies=1)
    assert seconds < 10.0


def loses_its_peer_within_a_message(kind: str) -> float:
    """Rank 0 ends while a part of a large message is there; Gloo never tells rank 1's operation."""
    group, store = connected()
    numbers = torch.zeros(LARGE)
    if group.rank == 0:
        store.get("coming")
        # By now rank 1 has said what it sends or wants.
        time.sleep(0.3)
        # Long enough for some of the message to have been written, and by far not all.
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if kind == "send":
            group.control.recv([numbers], 1, 0)
        elif kind == "receive":
            group.control.send([numbers], 1, 0)
        else:
            group.control.broadcast([numbers], dist.BroadcastOptions())
        time.sleep(60.0)
    store.set("coming", "")
    threading.Timer(1.5, group.break_off).start()
    began = time.monotonic()
    if kind == "future":
        future = group.control.broadcast([numbers], dist.BroadcastOptions()).get_future()
        group.fuse.settled(future).wait()
        return 0.0 if future.done() else time.monotonic() - began
    waits = {
        "broadcast": lambda: group.broadcast_tensors([numbers], source=0),
        "receive": lambda: group.receive_tensors([numbers], source=0),
        "send": lambda: group.send_tensors([numbers], targets=[0]),
    }[kind]
    try:
        waits()
    except PeerLost:
        return time.monotonic() - began
    return 0.0


@pytest.mark.parametrize("kind", ["broadcast", "future", "receive", "send"])
def test_a_message_of_which_a_part_has_come_does_not_keep_its_receiver(kind: str) -> None:
    """Nor, on its way out, whoever lets go of the group."""
    for _ in range(8):
        [_, seconds] = run_ranks(functools.partial(loses_its_peer_within_a_message, kind), 2, dies=0)
        assert seconds < 10.0
        if seconds > 1.0:
            return
        # Its peer ended before the message or after it, and Gloo told of that.
    pytest.fail("no peer ended within its message")


def breaks_off_alone() -> bool:
    group, _store = connected()
    group.break_off()
    group.sum(torch.zeros(1), what="numbers")
    return True


def test_one_that_is_alone_has_nothing_to_break_off() -> None:
    assert run_ranks(breaks_off_alone, 1) == [True]
