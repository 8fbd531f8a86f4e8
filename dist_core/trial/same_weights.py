"""One model on all replicas: whether they hold the same weights, and how their buffers stay the same.

SameWeights: each step looks at some parameters in turn, and at other elements of them each time; their bits are
compared. Where they differ, the replicas tell each other these elements: by no more than rounding on unlike devices,
and training goes on; by more, and they train different models.

MovingBuffers: those that the forward pass changes by itself, such as a codebook. DistributedDataParallel sends rank 0's
before each pass. Here they are sent behind a step in which some have been written, and only where something computes
with them: running statistics of normalizations differ within an epoch, as DDP's do between two passes, and are rank 0's
where it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dist_core.device import Mark
from dist_core.errors import InvalidTraining, PeerLost
from dist_core.generations.decision import all_equal, short_checksum
from dist_core.generations.generation import Generation
from dist_core.generations.state_transfer import broadcast_in_place
from dist_core.generations.step_vote import Voter
from dist_core.life import Listener
from dist_core.link.news import News
from dist_core.state.position import Position
from dist_core.torch_private import times_written
from dist_core.trial.models import Models

PARAMETERS = 2
"""Looked at in a step."""
ELEMENTS = 16
"""Elements of each parameter to compare."""
EVERY_ON_DEVICE = 8
"""Steps from one look to the next where weights lie on a device: what is looked at arrives meanwhile."""
ROUNDING = 1e-4
"""Share of the elements' root mean square that may differ where replicas compute on unlike devices."""
TOLERATED_STEPS = 100
"""After a difference of rounding, until the next look."""


Named = tuple[str, torch.Tensor]
"""A parameter with its name."""


@dataclass(slots=True)
class _Look:
    step: int
    names: list[str]
    counts: list[int]
    """Elements of each."""
    kinds: list[torch.dtype]
    content: torch.Tensor
    """Bytes on the host."""
    arrives: Mark | None

    def on_host(self) -> _Look:
        self.content = self.content.cpu()
        return self

    def values(self) -> list[list[float]]:
        rows, start = [], 0
        for count, kind in zip(self.counts, self.kinds, strict=True):
            size = count * kind.itemsize
            rows.append(self.content[start : start + size].view(kind).double().tolist())
            start += size
        return rows


class SameWeights(Voter, Listener):
    name = "weights"

    def __init__(self, generation: Generation, position: Position, models: Models, news: News) -> None:
        self._generation = generation
        self._position = position
        self._models = models
        self._news = news
        self._weights: list[Named] | None = None
        self._look: _Look | None = None
        self._waiting: _Look | None = None
        self._same_at: dict[str, int] = {}
        """The last step at which all replicas were seen to have the same, by parameter."""
        self._sleeps_until = 0
        self._has_told = False

    def entered(self, rank: int, number: int) -> None:
        self._begin_anew()

    def runs_again(self) -> None:
        self._begin_anew()

    def forget(self) -> None:
        """Forget what was compared: other weights are trained from now on, on all replicas."""
        self._weights = None

    def _begin_anew(self) -> None:
        """Begin to compare anew: another generation trains, or other models."""
        self._weights = self._look = self._waiting = None
        self._sleeps_until = 0

    # ------------------------------------------------------------------ a step's round

    def put(self) -> Sequence[float]:
        step, weights = self._position.steps, self._weights_to_compare()
        if not weights:
            self._look = None
        elif weights[0][1].device.type == "cpu":
            self._look = _sampled(step, _in_turn(weights, step))
        else:
            self._look = self._arrived(step, weights)
        return self._numbers()

    def put_all(self) -> Sequence[float]:
        """Put in numbers of all weights: between steps there is time for it."""
        weights = self._weights_to_compare()
        self._look = _sampled(self._position.steps, weights).on_host() if weights else None
        return self._numbers()

    def _numbers(self) -> Sequence[float]:
        if self._look is None:
            return 0.0, 0.0
        # Never that of a replica which did not look.
        checksum = 1.0 + short_checksum(self._look.content.numpy().tobytes())
        return checksum, checksum**2

    def _weights_to_compare(self) -> list[Named]:
        group = self._generation.group
        if group.world_size == 1 or group.members > 1 or self._position.steps < self._sleeps_until:
            return []
        if self._weights is None:
            self._weights = self._comparable()
        return self._weights

    def take(self, agreed: Sequence[float], world_size: int) -> None:
        look = self._look
        if look is None:
            return
        if all_equal(agreed[0], agreed[1], world_size):
            self._same_at.update(dict.fromkeys(look.names, look.step))
            return
        try:
            replicas = self._generation.group.gather_json(look.values())
        except PeerLost as error:
            self._generation.mark_broken(str(error))
            return
        rows = [[each[index] for each in replicas] for index in range(len(look.names))]
        found = [(*_difference(row), name) for row, name in zip(rows, look.names, strict=True)]
        difference, relative, name = max(found, key=lambda each: each[1])
        if relative <= ROUNDING:
            self._sleeps_until = look.step + TOLERATED_STEPS
            return
        if look.step == 0:
            if self._take_over():
                self._news.warn(
                    f"the replicas' models differed in the first step (the parameter {name!r} by {difference:.3g}), as "
                    "where the first forward pass sets weights by its samples or at random, or where only some "
                    "replicas have the file that weights are loaded from: all replicas go on with rank 0's"
                )
            return
        if any(model.resyncs for model in self._models):
            if self._take_over() and not self._has_told:
                self._has_told = True
                self._news.warn(
                    f"the replicas' models were no longer equal (the parameter {name!r} differed by {difference:.3g} "
                    f"at step {look.step}{self._since(name)}): all replicas took over rank 0's weights, and will do so "
                    "whenever this happens"
                )
            return
        raise InvalidTraining(
            f"the replicas' models are no longer equal: the parameter {name!r} differs by {difference:.3g} between "
            f"them at step {look.step}{self._since(name)}. Something changed weights or gradients on one replica "
            "only: random numbers that the optimizer's step, or code between backward() and step(), draws; weights "
            "that were loaded from a copy that only one replica has; gradients or counters of the script that "
            "replicas which joined later did not get. Draw from a generator with the same seed on all replicas, "
            "hold such values in dist_core.keep(), or take over rank 0's weights: AdaptiveDataParallel(..., "
            "on_divergence='resync')"
        )

    def _since(self, name: str) -> str:
        return f", and was equal at step {self._same_at[name]}" if name in self._same_at else ""

    def _take_over(self) -> bool:
        """Take over rank 0's weights; False where a replica was lost meanwhile."""
        try:
            self._generation.group.broadcast_tensors(list(self._models.replicated()))
        except PeerLost as error:
            self._generation.mark_broken(str(error))
            return False
        return True

    # ------------------------------------------------------------------ looking

    def _comparable(self) -> list[Named]:
        named: list[Named] = []
        for number, model in enumerate(self._models):
            prefix = "" if len(self._models) == 1 else f"model {number}: "
            for name, parameter in model.module.named_parameters():
                lies_together = parameter.is_contiguous() or (
                    parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
                )
                if parameter.requires_grad and lies_together and parameter.numel() and _is_plain(parameter):
                    named.append((prefix + name, parameter))
        return [each for each in named if each[1].device == named[0][1].device]

    def _arrived(self, step: int, weights: list[Named]) -> _Look | None:
        """Give a look at weights on a device that has arrived; the next one begins then."""
        if step % EVERY_ON_DEVICE == 0:
            look = _sampled(step, _in_turn(weights, step // EVERY_ON_DEVICE))
            device = self._models[0].device_of_gradients
            host = device.host_memory(look.content.shape, torch.uint8)
            device.copy(host, look.content)
            look.content, look.arrives = host, device.mark()
            self._waiting = look
            return None
        if step % EVERY_ON_DEVICE == EVERY_ON_DEVICE - 1 and self._waiting is not None:
            look, self._waiting = self._waiting, None
            assert look.arrives is not None
            look.arrives.wait()
            return look
        return None


def _in_turn(weights: Sequence[Named], turn: int) -> Sequence[Named]:
    """Return some weights in turn; all of them at first."""
    first = turn * PARAMETERS
    return [weights[index % len(weights)] for index in range(first, first + PARAMETERS)] if turn else weights


def _sampled(step: int, weights: Sequence[Named]) -> _Look:
    counts, parts = [], []
    for _, weight in weights:
        size = weight.numel()
        stride = max(1, size // ELEMENTS)
        start = step % stride
        counts.append(min(ELEMENTS, (size - 1 - start) // stride + 1))
        part = weight.detach().as_strided((counts[-1],), (stride,), weight.storage_offset() + start)
        parts.append(part.contiguous().view(torch.uint8))
    names, kinds = [name for name, _ in weights], [weight.dtype for _, weight in weights]
    return _Look(step, names, counts, kinds, torch.cat(parts), None)


def _is_plain(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter has memory of its own here, and does not stand for parts on several processes."""
    return type(parameter) is torch.nn.Parameter and parameter.layout is torch.strided and not parameter.is_meta


def _difference(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Largest between replicas of elements of one parameter: as it is, and relative to their root mean square."""
    spread = 0.0
    for elements in zip(*rows, strict=True):
        if all(map(math.isnan, elements)):
            continue
        apart = max(elements) - min(elements)
        spread = math.inf if math.isnan(apart) or any(map(math.isnan, elements)) else max(spread, apart)
    values = [each for row in rows for each in row if math.isfinite(each)]
    size = math.sqrt(math.fsum(each**2 for each in values) / len(values)) if values else 0.0
    return spread, spread / size if size else (math.inf if spread else 0.0)


MOST_BYTES_KEPT = 1 << 26
"""Most memory of buffers that are copied in each step, for one that is repeated."""
_Mark = list[tuple[int, int]]
"""Address of each buffer, and how often it was written."""


class MovingBuffers(Voter, Listener):
    name = "buffers"

    def __init__(self, generation: Generation, models: Models) -> None:
        self._generation = generation
        self._models = models
        self._modules: tuple[int, list[torch.nn.Module]] = (0, [])
        """Modules with buffers, beside normalizations, of so many models."""
        self._before: _Mark | None = None
        self._marked: _Mark | None = None
        """Address and version of all that a forward pass may move, weights without a gradient among them."""
        self._held_by: list[tuple[dict[str, Any], str]] | None = None
        """Dictionaries of modules that hold these, and their names; None where that is to be found out anew."""
        self._moves = False
        """Some of these have been written."""
        self._kept: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        """Content of them before the present step, by what holds them."""

    def entered(self, rank: int, number: int) -> None:
        self._begin_anew()
        self._before = _mark_of(self._buffers())
        self._kept = []

    def runs_again(self) -> None:
        self._begin_anew()

    def step_repeats(self) -> None:
        """Put back what the step's forward passes have written: they are made again."""
        for held_by, name, before in self._kept:
            present = held_by[name]
            if present.shape == before.shape:
                present.data.copy_(before)
            elif not isinstance(present, torch.nn.Parameter):
                held_by[name] = before.clone()

    def step_ended(self) -> None:
        if self._generation.group.world_size > 1:
            self._keep()

    def _keep(self) -> None:
        present = [(held_by, name, held_by[name]) for held_by, name in self._places()]
        mark = _mark_of([each for _, _, each in present])
        self._moves = self._moves or (self._marked is not None and mark != self._marked)
        self._marked = mark
        keeps = self._moves and sum(each.nbytes for _, _, each in present) <= MOST_BYTES_KEPT
        self._kept = [(held_by, name, each.detach().clone()) for held_by, name, each in present] if keeps else []

    def _places(self) -> list[tuple[dict[str, Any], str]]:
        """Return what holds tensors that a forward pass may move, normalizations aside, and their names."""
        if self._held_by is None:
            self._held_by = [
                (held_by, name)
                for module in self._beside_norms()
                for held_by in (module._buffers, module._parameters)
                for name, each in held_by.items()
                if each is not None and not each.requires_grad
            ]
        return [(held_by, name) for held_by, name in self._held_by if held_by.get(name) is not None]

    def _beside_norms(self) -> Iterator[torch.nn.Module]:
        norms = torch.nn.modules.batchnorm._NormBase
        for model in self._models:
            yield from (each for each in model.module.modules() if not isinstance(each, norms))

    def loop_began(self, *, completed: bool) -> None:
        # Weights may have been frozen, or models added, meanwhile.
        self._held_by = self._marked = None

    def _begin_anew(self) -> None:
        self._modules, self._before = (0, []), None

    def put(self) -> Sequence[float]:
        """Tell whether a buffer has been written since the last step, and of which shapes they are."""
        group = self._generation.group
        if group.world_size == 1 or group.members > 1:
            return 0.0, 0.0, 0.0
        buffers = self._buffers()
        now, before = _mark_of(buffers), self._before
        self._before = now
        shapes = float(short_checksum(repr([each.shape for each in buffers]).encode())) if buffers else 0.0
        return float(before is not None and now != before), shapes, shapes**2

    def follow(self, agreed: Sequence[float]) -> None:
        """Send buffers that have been written on any replica; collective."""
        group, (written, shapes, squares) = self._generation.group, agreed
        if not written or not all_equal(shapes, squares, group.world_size) or self._generation.broken is not None:
            return
        buffers = self._buffers()
        try:
            broadcast_in_place(group, buffers)
        except PeerLost as error:
            self._generation.mark_broken(str(error))
        self._before = _mark_of(buffers)

    def _buffers(self) -> list[torch.Tensor]:
        """Return those that are part of the models' state, in their order."""
        number, modules = self._modules
        if number != len(self._models):
            modules = [each for each in self._beside_norms() if each._buffers]
            self._modules = len(self._models), modules
        return [
            buffer
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]


def _mark_of(buffers: Sequence[torch.Tensor]) -> _Mark:
    return [(each.data_ptr(), times_written(each)) for each in buffers]
