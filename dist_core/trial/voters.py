"""Voters in each step's round that tell whether replicas which should be alike are: each voter is a line of it.

A voter puts a number in and its square; they are alike where the sums over the replicas say so
(``decision.all_equal``). Replicas that are not would train other models, without a word.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dist_core.errors import InvalidTraining
from dist_core.generations.decision import all_equal, fingerprint
from dist_core.generations.generation import Generation
from dist_core.generations.step_record import StepRecord
from dist_core.generations.step_vote import StepVote, Voter
from dist_core.state.position import Position
from dist_core.trial.models import Models
from dist_core.trial.pacing import Pacing
from dist_core.trial.same_weights import SameWeights

_PLACES = (
    "the replicas wait for each other at different places in the code: this one {} {}, {}. Something that a replica "
    "counts or measures alone decides when a loop ends: a clock, a random number, a count that is not held in the "
    "function with the epoch loop. Hold it in dist_core.keep(), or decide from values that all replicas share, such as "
    "sums of an Accumulator"
)


class SameNumber(Voter, ABC):
    """Each replica puts in one number, and its square; training ends where the replicas' numbers differ."""

    @abstractmethod
    def number(self) -> int: ...

    @abstractmethod
    def refusal(self, total: float, world_size: int) -> str:
        """Say what differs, and what to do; ``total``: sum of the replicas' numbers."""

    def put(self) -> Sequence[float]:
        number = float(self.number())
        return number, number**2

    def take(self, agreed: Sequence[float], world_size: int) -> None:
        total, squares = agreed
        if not all_equal(total, squares, world_size):
            raise InvalidTraining(self.refusal(total, world_size))


class SameOrder(SameNumber):
    """Check that all replicas stand at one place of the data, and go through it in one order."""

    name = "order"

    def __init__(self, pacing: Pacing) -> None:
        self._pacing = pacing

    def number(self) -> int:
        return self._pacing.order_fingerprint

    def refusal(self, total: float, world_size: int) -> str:
        loader = self._pacing.loader
        if loader is not None and loader.reads_a_stream:
            return (
                "the replicas read different samples from the iterable dataset, but each replica trains its part of "
                "one common batch: samples would be trained twice or never. Either the dataset gives each process "
                "its own part (torch.distributed.get_rank(), RANK, split_dataset_by_node): remove that, because "
                "AdaptiveDataLoader divides every batch. Or it draws random numbers from something other than the "
                "global generators of torch, NumPy and Python, which are seeded alike while it is read"
            )
        return (
            "the replicas are at different places in the data, so that samples would be trained twice or never. "
            "Either the sampler draws a different order on each replica: let it draw from the global generator of "
            "torch, NumPy or Python, or from a torch.Generator in its attribute `generator`, which are all seeded "
            "alike. Or a replica has left its training loop by a count or a condition of its own: let the loop run "
            "to its end"
        )


class SamePlace(Voter):
    """Check that replicas which wait for each other stand at one place of the code.

    One that has left the loops waits elsewhere than those which train on: neither would come to an end.
    """

    name = "place"

    def __init__(self, position: Position) -> None:
        self._position = position

    def put(self) -> Sequence[float]:
        return 1.0, float(self._position.epoch), 0.0, 0.0

    def take(self, agreed: Sequence[float], world_size: int) -> None:
        if round(agreed[0]) != world_size:
            raise InvalidTraining(_PLACES.format("is in a step of epoch", self._position.epoch, _others(agreed)))

    def behind(self) -> Sequence[float]:
        """Return the vote of a replica that is in no training loop."""
        return 0.0, 0.0, 1.0, float(self._position.epoch)

    def take_behind(self, agreed: Sequence[float]) -> None:
        """Take the sums behind a loop; raise InvalidTraining where others are in a step."""
        if round(agreed[0]):
            raise InvalidTraining(
                _PLACES.format("is past the training loops of epoch", self._position.epoch, _others(agreed))
            )


def _others(agreed: Sequence[float]) -> str:
    in_steps, epochs, behind, behind_epochs = agreed
    steps = f"{in_steps:.0f} are in a step (of epoch {epochs / in_steps:.0f})" if in_steps else "none is in a step"
    return f"{steps}, {behind:.0f} past the loops" + (f" (of epoch {behind_epochs / behind:.0f})" if behind else "")


class SameUpdates(SameNumber):
    """Check that all replicas have made as many updates in the step before."""

    name = "updates"

    def __init__(self, record: StepRecord) -> None:
        self._record = record
        self._put = 0

    def number(self) -> int:
        self._put = self._record.updates_of_last
        return self._put

    def refusal(self, total: float, world_size: int) -> str:
        return (
            f"this replica's optimizers and schedules made {self._put} updates in the last step, "
            f"and those of all {world_size} replicas {total:.0f}, which is not as many on each. The "
            "training loop skips optimizer.step() after backward() for what it finds in a batch, of which each "
            "replica sees its own part, or by a count of its own, which a replica that joined later may have begun "
            "anew. Skip the batch before backward(): then all replicas leave it out. Or decide by what all "
            "replicas share, such as a sum by torch.distributed.all_reduce(), and hold counts in dist_core.keep()"
        )


class SameRates(SameNumber):
    """Check that all replicas train at one learning rate."""

    name = "rates"

    def __init__(self, models: Models) -> None:
        self._models = models

    def number(self) -> int:
        return fingerprint(self._models.rates)

    def refusal(self, total: float, world_size: int) -> str:
        return (
            "the learning rates differ between the replicas. They are set from a value that only one replica "
            "knows, such as its own part of a metric: sum it with an Accumulator first, or use a schedule of "
            "torch, for which the replicas agree on one metric"
        )


class SameCode:
    """Check that all replicas meet between steps: none trains on, and none has found out another model."""

    def __init__(self, generation: Generation, vote: StepVote, place: SamePlace, weights: SameWeights) -> None:
        self._generation = generation
        self._vote = vote
        self._place = place
        self._weights = weights

    def check(self) -> None:
        """Compare the replicas at once, collectively; raise InvalidTraining, and PeerLost."""
        group = self._generation.group
        # Of a replica's processes some may have sums of their own.
        if group.world_size == 1 or group.members > 1:
            return
        place, weights = self._place, self._weights
        agreed = self._vote.meet(lambda: {place.name: place.behind(), weights.name: weights.put_all()})
        if agreed is not None:
            place.take_behind(agreed[place.name])
            weights.take(agreed[weights.name], group.world_size)
