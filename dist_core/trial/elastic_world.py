"""torch's default process group in a trial: always the replicas that train at present.

A script's own ``torch.distributed.all_reduce(metric)``, ``get_rank()`` or SyncBatchNorm works on it as under torchrun.
A replica that is lost meanwhile does not raise into the script: within a training loop the step does not count, and
elsewhere the collective is made again by those that are left. A pass that does not count (a joiner's, a loop that runs
once more for what comes after it) takes part in nothing. Before the replicas have met a collective is refused, for each
of them would be alone in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dist_core.errors import InvalidTraining, PeerLost
from dist_core.generations.generation import Generation
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.state.position import Position
from dist_core.torch_private import (
    give_new_groups,
    knows_group,
    note_another_group,
    note_group,
    replace_default_group,
    work_of,
)
from dist_core.trial.rendezvous import Rendezvous


class ElasticWorld(dist.ProcessGroup):
    """Process group of the replicas that train at present.

    ``rank``, ``expected``: this replica's, and how many the trial was started with, until they have met.

    ``takes_part``: whether what the code does now has an effect on the trial.
    """

    def __init__(
        self,
        generation: Generation,
        position: Position,
        together: Rendezvous,
        *,
        rank: int,
        expected: int,
        takes_part: Callable[[], bool],
    ) -> None:
        super().__init__(rank, expected)  # type: ignore[call-arg]  # an overload the stubs leave out
        self._generation = generation
        self._position = position
        self._together = together
        self._takes_part = takes_part
        self._rank, self._expected = rank, expected
        self._twins: list[ElasticWorld] = []

    def install(self) -> None:
        """Become torch's default group; called whenever the set of replicas changes."""
        self._twins = [twin for twin in self._twins if knows_group(twin)]
        replace_default_group(self)
        for twin in self._twins:
            note_group(twin, twin.group_name)

    def twin(self) -> ElasticWorld:
        """Return another group of the same replicas, which a script may destroy."""
        twin = ElasticWorld(
            self._generation,
            self._position,
            self._together,
            rank=self._rank,
            expected=self._expected,
            takes_part=self._takes_part,
        )
        note_another_group(twin)
        self._twins.append(twin)
        return twin

    def remove(self) -> None:
        replace_default_group(None)

    def rank(self) -> int:
        return self._generation.group.rank if self._generation.joined else self._rank

    def size(self) -> int:
        return self._generation.group.world_size if self._generation.joined else self._expected

    def name(self) -> str:
        return "elastune"

    @property
    def group_name(self) -> str:  # type: ignore[override]  # a name is a text with a type of torch's own
        return f"elastune-{id(self)}"

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "elastune"

    # ------------------------------------------------------------------ collectives

    def allreduce(self, tensors: Any, options: Any = None) -> dist.Work:  # type: ignore[override]  # as torch calls it
        tensors = _listed(tensors)
        return self._make(tensors, tensors, lambda over: over.allreduce(tensors, *_given(options)))

    def broadcast(self, tensors: Any, options: Any = None) -> dist.Work:  # type: ignore[override]  # as torch calls it
        tensors = _listed(tensors)
        return self._make(tensors, tensors, lambda over: over.broadcast(tensors, *_given(options)))

    def reduce(self, tensors: Any, options: Any = None) -> dist.Work:  # type: ignore[override]  # as torch calls it
        tensors = _listed(tensors)
        return self._make(tensors, tensors, lambda over: over.reduce(tensors, *_given(options)))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> dist.Work:
        def alone() -> None:
            for into, each in zip(outputs, inputs, strict=True):
                for place in into:
                    place.copy_(each)

        return self._make(inputs, [], lambda over: over.allgather(outputs, inputs, *_given(options)), alone)

    def all_gather_single(self, output: Any, each: Any, options: Any = None) -> dist.Work:
        # Gloo splits the first dimension among the ranks, whatever it is.
        places, flat = output.view(-1), each.reshape(-1)

        def alone() -> None:
            places.view(self.size(), -1).copy_(flat)

        return self._make([each], [], lambda over: over._allgather_base(places, flat, *_given(options)), alone)

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> dist.Work:  # noqa: A002  # torch's names
        """Gather into one tensor, by the name that this call had before torch 2.13."""
        return self.all_gather_single(output, input, opts)

    def allreduce_coalesced(self, tensors: Any, options: Any = None) -> dist.Work:
        tensors = _listed(tensors)
        return self._make(tensors, tensors, lambda over: over.allreduce_coalesced(tensors, *_given(options)))

    def barrier(self, *arguments: Any, **options: Any) -> dist.Work:
        nothing = torch.zeros(1)
        return self._make([nothing], [nothing], lambda over: over.allreduce([nothing]), on_host=True)

    def _make(
        self,
        inputs: Sequence[torch.Tensor],
        changed: Sequence[torch.Tensor],
        collective: Callable[[dist.ProcessGroup], dist.Work],
        alone: Callable[[], None] = lambda: None,
        *,
        on_host: bool = False,
    ) -> dist.Work:
        """Make a collective; ``changed``: inputs changed in place, ``alone``: its result where nobody takes part."""
        generation, position = self._generation, self._position
        if not self._takes_part():
            alone()
            return _done(inputs)
        if not generation.joined:
            if self._expected > 1:
                raise InvalidTraining(
                    f"a torch.distributed collective was called before the {self._expected} replicas of this trial "
                    "have met, which they do at the first training step. Call it in the training loop or after it. "
                    "DistributedDataParallel calls collectives when it is created; instead, wrap the model with "
                    "dist_core.AdaptiveDataParallel and read its data with dist_core.AdaptiveDataLoader"
                )
            alone()
            return _done(inputs)
        before = [tensor.clone() for tensor in changed] if not position.in_training_loop else []

        def attempt(group: ReplicaGroup) -> None:
            for tensor, kept in zip(changed, before, strict=False):
                tensor.copy_(kept)
            over = group.control if on_host else group.carrying(inputs)
            try:
                group.wait(collective(over), over)
            except RuntimeError as error:
                raise PeerLost(f"a replica vanished in a collective of the script's own: {error}") from error

        if not position.in_training_loop:
            self._together.do(attempt)
        elif generation.broken is None:
            try:
                attempt(generation.group)
            except PeerLost as error:
                generation.mark_broken(str(error))
        return _done(inputs)


def _refused(name: str) -> Callable[..., dist.Work]:
    def refuse(self: ElasticWorld, *arguments: Any, **options: Any) -> dist.Work:
        raise InvalidTraining(
            f"torch.distributed.{name} addresses single ranks, and the ranks of an elastic trial change while it "
            "runs; use all_reduce, all_gather, broadcast or barrier, or dist_core.Accumulator"
        )

    return refuse


for _name, _shown in {
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_single",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "allgather_coalesced": "all_gather_coalesced",
    "all_gather_single_coalesced": "all_gather in a coalescing manager",
    "reduce_scatter_single_coalesced": "reduce_scatter in a coalescing manager",
}.items():
    setattr(ElasticWorld, _name, _refused(_shown))


def _group_of(ranks: Sequence[int] | None) -> dist.ProcessGroup | None:
    """Return the group that a script makes of these ranks; None where the default group is none of ours."""
    world = dist.GroupMember.WORLD if dist.is_initialized() else None
    if not isinstance(world, ElasticWorld):
        return None
    if ranks is None or sorted(ranks) == list(range(world.size())):
        return world.twin()
    raise InvalidTraining(
        f"torch.distributed.new_group was given the ranks {list(ranks)} of {world.size()}, and the ranks of an elastic "
        "trial change while it runs; leave them out, for the group of all replicas"
    )


give_new_groups(_group_of)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _given(options: Any) -> tuple[Any, ...]:
    return () if options is None else (options,)


def _done(tensors: Sequence[torch.Tensor]) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors))
    return work_of(future)
