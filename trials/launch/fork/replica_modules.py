"""What most replicas import, in the order in which a fork server loads it.

The first process has what every replica needs, and stays without torch for those whose code does. torch's compiler
takes as long to import as the rest of torch. The first optimizer needs it, the first line of a trial does not: so the
first replicas start without it.
"""

from __future__ import annotations

from collections.abc import Sequence

STAGES = (
    ("numpy", "httpx2", "dist_core.trial.plain_replica", "dist_core.present", "dist_core.training.api"),
    ("torch", "torch.distributed", "torch.utils.data", "dist_core.training.model", "dist_core.training.loader"),
    ("torch._dynamo", "dist_core.replica_preload"),
)


def stages_for(preload: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For replicas that import these modules; no process has torch unless it is among them."""
    without, with_torch, *later = STAGES
    if not any(name.partition(".")[0] == "torch" for name in preload):
        return ((*without, *preload),)
    return (without, (*with_torch, *(name for name in preload if name not in with_torch)), *later)
