"""PowerSGD (Vogels et al., NeurIPS'19) by torch's own hook: matrices travel as two thin factors, errors are fed back.

Its state (error feedback, factors) belongs to a generation: it starts anew after each rescale, on all replicas alike.
"""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from dist_core.errors import InvalidTraining
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.reduce.contract import Bucket, ReducedBucket, ReductionStrategy


class PowerSGD(ReductionStrategy):
    name = "power_sgd"
    exact = False
    comparable = False
    reads_layout = True
    needs = GroupNeeds(extra=1)

    def __init__(self, matrix_rank: int = 2, warm_up_steps: int = 20) -> None:
        """Compress to this rank, behind ``warm_up_steps`` uncompressed ones.

        torch needs at least 2 of these, one for each bucket layout.
        """
        if matrix_rank < 1 or warm_up_steps < 2:
            raise InvalidTraining(
                f"power_sgd was given matrix_rank={matrix_rank}, warm_up_steps={warm_up_steps}; matrix_rank must be "
                "at least 1 and warm_up_steps at least 2"
            )
        self._matrix_rank, self._warm_up_steps = matrix_rank, warm_up_steps

    def enter(self, group: ReplicaGroup) -> None:
        self._world_size = group.world_size
        self._state = torch_power_sgd.PowerSGDState(
            process_group=group.extra[0] if group.extra else group.data,
            matrix_approximation_rank=self._matrix_rank,
            start_powerSGD_iter=self._warm_up_steps,
        )

    def reduce(self, bucket: Bucket) -> ReducedBucket:
        layout = bucket.layout()
        # The hook averages over the replicas; our buffers are weighted to be summed.
        layout.set_buffer(bucket.buffer.mul_(self._world_size))
        return torch_power_sgd.powerSGD_hook(self._state, layout)
