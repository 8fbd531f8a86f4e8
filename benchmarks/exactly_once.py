"""Passes in which some sample is missed or seen twice, of ten thousand random traces of rescales and crashes.

The peer is the division AdaptDL uses: each replica takes every K-th sample of what is left of the permutation, padded
to equal lengths, and the index advances by replicas times local batch whatever was padded.
"""

from __future__ import annotations

import numpy as np

from benchmarks.frame import Measurement
from dist_core.data.order import ElasticCursor

TRACES = 10_000


def ours(rng: np.random.Generator) -> bool:
    samples = int(rng.integers(1, 400))
    cursor = ElasticCursor(samples, shuffle=True, seed=int(rng.integers(2**20)))
    seen = np.zeros(samples, dtype=int)
    while cursor.passes == 0:
        world_size, batch = int(rng.integers(1, 9)), int(rng.integers(1, 65))
        take = cursor.take(batch, avoid_small_rest=bool(rng.integers(2)))
        plans = [
            cursor.plan(take, rank=rank, world_size=world_size, accumulation=int(rng.integers(3)))
            for rank in range(world_size)
        ]
        if rng.random() < 0.1:
            # The step crashed: what was computed does not count. Half of the crashes end the job, which resumes.
            if rng.random() < 0.5:
                state = cursor.state_dict()
                cursor = ElasticCursor(samples, shuffle=True)
                cursor.load_state_dict(state)
            continue
        for plan in plans:
            if plan.weight:
                np.add.at(seen, np.concatenate(plan.micro_batches), 1)
        cursor.commit(take)
    return bool((seen == 1).all())


def theirs(rng: np.random.Generator) -> bool:
    samples = int(rng.integers(1, 400))
    order = rng.permutation(samples)
    seen = np.zeros(samples, dtype=int)
    index = 0
    while index < samples:
        replicas, batch = int(rng.integers(1, 9)), int(rng.integers(1, 65))
        local = -(-batch // replicas)
        shares = [list(order[index + rank :: replicas]) for rank in range(replicas)]
        longest = max(len(share) for share in shares)
        for rank, share in enumerate(shares):
            if len(share) < longest:
                share.append(order[rank % samples])
        # Between two changes a few batches are taken.
        for _ in range(int(rng.integers(1, 6))):
            if not any(shares):
                break
            for share in shares:
                np.add.at(seen, np.array(share[:local], dtype=int), 1)
                del share[:local]
            index += replicas * local
    return bool((seen == 1).all())


def measure() -> list[Measurement]:
    rng = np.random.default_rng(0)
    wrong = sum(not ours(rng) for _ in range(TRACES))
    wrong_there = sum(not theirs(rng) for _ in range(TRACES))
    return [
        Measurement(
            what=f"passes of {TRACES} that are not exactly once",
            ours=float(wrong),
            peer=float(wrong_there),
            unit="passes",
            peer_name="AdaptDL's division",
            target=0.0,
        )
    ]
