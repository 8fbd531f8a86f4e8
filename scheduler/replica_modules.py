"""What most replicas import, in the order in which a fork server loads it.

torch's compiler takes as long to import as the rest of torch. The first optimizer needs it, the first line of a trial
does not: so the first replicas start without it.
"""

STAGES = (
    ("torch", "torch.distributed", "torch.utils.data", "dist_core.data_parallel", "dist_core.data_loader"),
    ("torch._dynamo", "dist_core.replica_preload"),
)
