"""A replica's code that keeps counts and its best weights in variables, as tutorials do: joiners begin them anew."""

from __future__ import annotations

import copy
import os
import time
from types import SimpleNamespace

import torch

import dist_core
from tests.support.habits import Kit, examples, network
from tests.support.replica_main import run_as_replica
from tests.support.shared_habits import mse

KEEPS, GROWS = "KEEPS", "GROWS"


def main() -> int:
    """``PATIENCE``: epochs without a better one after which it stops.

    ``KEEPS``: it says what it keeps. ``GROWS``: others come.
    """
    torch.set_num_threads(1)
    return run_as_replica(lambda: train(Kit(elastic=True), int(os.environ["PATIENCE"])), told=Exception)


def train(kit: Kit, patience: int) -> float:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, wrapped = kit.loader(examples()), kit.wrap(model, optimizer)
    held = {"best": None, "waited": 0}
    kept = dist_core.keep(**held) if KEEPS in os.environ else SimpleNamespace(**held)
    for epoch in kit.epochs(40):
        for x, y in loader:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
            # It is not over before others have come. All its epochs are as long: joiners aim by the last one.
            waits = GROWS in os.environ and dist_core.world_size() == 1
            time.sleep(0.5 if waits else 0.01)
        dist_core.report(float(epoch), epoch)
        # The first epoch that it sees is the best.
        if kept.best is None:
            kept.best = copy.deepcopy(model.state_dict())
        else:
            kept.waited += 1
        if kept.waited >= patience or epoch == 39:
            break
    assert kept.best is not None
    model.load_state_dict(kept.best)
    sums = dist_core.Accumulator()
    with torch.no_grad():
        for x, y in kit.loader(examples(60), 10):
            sums["loss"] += float(mse(wrapped(x), y, reduction="sum"))
    with sums.synchronized():
        return float(sums["loss"])
