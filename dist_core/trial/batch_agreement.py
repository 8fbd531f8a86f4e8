"""BatchAgreement: rank 0 chooses the batch, and all replicas change to it at the same step boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dist_core.data.batch_size import Adaptation
from dist_core.errors import EXIT_PREEMPTED, InvalidTraining, PeerLost, ReplicaExit
from dist_core.generations.generation import Generation
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.generations.step_vote import Voter
from dist_core.goodput import BatchBounds, GradientStatistics
from dist_core.life import Listener
from dist_core.state.memory_limit import MemoryLimit
from dist_core.state.states import StateRegistry
from dist_core.trial.chosen_layout import ChosenLayout

_NOTHING = (0.0, 0.0)


class BatchAgreement(Voter, Listener):
    """The batch that rank 0 chooses and all replicas change to at the same step.

    ``statistics``: of the gradients as known now, the same on all replicas.
    """

    name = "batch"

    def __init__(
        self,
        generation: Generation,
        registry: StateRegistry,
        memory_limit: MemoryLimit,
        statistics: Callable[[], GradientStatistics | None],
        layout: ChosenLayout,
        *,
        node_kind: str,
    ) -> None:
        self._generation = generation
        self._registry = registry
        self._memory_limit = memory_limit
        self._statistics = statistics
        self._layout = layout
        self._node_kind = node_kind
        self.adaptation: Adaptation | None = None
        """None until a loader trains."""
        self._next: tuple[ReplicaGroup, tuple[int, int]] | None = None
        """Batch that rank 0 proposes for a generation that is prepared."""
        self._agreed_for_next: Sequence[float] = _NOTHING
        self._kept: tuple[int, int] | None = None
        """Batch that the replicas agree on already, for code that runs again."""

    # ------------------------------------------------------------------ whose batch it is

    def adopt(self, bounds: BatchBounds) -> Adaptation:
        """Adopt a loader that begins to train within these bounds."""
        self.adaptation = Adaptation(bounds, self._statistics, node_kind=self._node_kind, layout=self._layout.name)
        self._registry.register("adaptation", self.adaptation)
        return self.adaptation

    def begin(self) -> None:
        """Begin with the adopted batch as the one that all replicas have."""
        assert self.adaptation is not None
        if self._kept is not None:
            self._heed_memory()
            self.adaptation.use(*self._kept)
            self._kept = None
        elif self._generation.joined:
            self.agree()

    def keep(self) -> None:
        """Keep the batch that is agreed on: the user's code is going to run again."""
        self._kept = None if self.adaptation is None else (self.adaptation.atomic_batch, self.adaptation.accumulation)

    def runs_again(self) -> None:
        self.adaptation = None

    # ------------------------------------------------------------------ how it is agreed on

    def agree(self) -> None:
        """Agree on the batch that rank 0 chooses for the group that has just come together; collective."""
        if self.adaptation is None:
            return
        self._heed_memory()
        mine = self._chosen_for(self._generation.group)
        try:
            atomic, accumulation = self._generation.group.broadcast_json(list(mine))
        except PeerLost as error:
            self._generation.mark_broken(str(error))
            return
        self.adaptation.use(atomic, accumulation)

    def put(self) -> Sequence[float]:
        """Return this replica's vote: batches for the present generation, and for the prepared one.

        So that a switch needs no round of its own to agree on it.
        """
        group, prepared = self._generation.group, self._generation.prepared
        if group.rank != 0 or self.adaptation is None:
            return (*_NOTHING, *_NOTHING)
        proposal = self.adaptation.proposal(group.num_nodes, group.num_shares)
        now = _NOTHING if proposal is None else proposal
        later = _NOTHING if prepared is None or prepared.group is None else self._for_prepared(prepared.group)
        return (*map(float, now), *map(float, later))

    def _for_prepared(self, group: ReplicaGroup) -> tuple[int, int]:
        """Worked out once, because it is asked for at every step."""
        if self._next is None or self._next[0] is not group:
            self._next = (group, self._chosen_for(group))
        return self._next[1]

    def follow(self, agreed: Sequence[float]) -> None:
        self._use(*agreed[:2])
        self._agreed_for_next = agreed[2:]

    def use_for_next(self) -> None:
        """Use what the latest round has brought for the generation that is prepared."""
        self._use(*self._agreed_for_next)

    def _use(self, atomic: float, accumulation: float) -> None:
        if self.adaptation is not None and atomic > 0:
            self.adaptation.use(int(atomic), int(accumulation))

    def forget_next(self) -> None:
        self._next = None

    def lost(self) -> None:
        self._next = None

    def _chosen_for(self, group: ReplicaGroup) -> tuple[int, int]:
        assert self.adaptation is not None
        return self.adaptation.choose(group.num_nodes, group.num_shares, switching=True)

    # ------------------------------------------------------------------ what limits it

    def forbid_accumulation(self) -> None:
        """Make steps of one pass each from now on."""
        if self.adaptation is not None:
            self.adaptation.forbid_accumulation()

    def _heed_memory(self) -> None:
        limit = self._memory_limit.most_examples
        if limit is not None and self.adaptation is not None:
            self.adaptation.limit(limit)

    def shrink(self, error: BaseException) -> str:
        """Note the bound of a batch that did not fit into memory, and say which.

        Raises InvalidTraining if none smaller goes.
        """
        assert self.adaptation is not None
        bounds, atomic = self.adaptation.bounds, self.adaptation.atomic_batch
        limit = self._memory_limit.lower(atomic, bounds.min_atomic) if bounds.adaptive else None
        if limit is None and self._layout.give_up():
            raise ReplicaExit("preempted", EXIT_PREEMPTED) from error
        if limit is None:
            raise InvalidTraining(
                f"out of memory with {atomic} examples a pass, and no smaller batch is allowed: {error}. Lower "
                "batch_size, or let it adapt with gradient accumulation: "
                "autoscale_batch_size(..., local_bsz_bounds=(lower, upper), gradient_accumulation=True)"
            ) from error
        return f"out of memory with {atomic} examples a pass: from now on at most {limit}"
