"""DividedState: what a checkpoint holds of a model whose weights are divided among the processes of a replica.

Weights and the optimizers' state go by the names of the model's parameters, and each tensor says which rows of it are
there. So survivors and joiners of equal shape exchange them as they are, and a checkpoint can be gone on from by any
number of processes, divided otherwise or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dist_core.errors import InvalidTraining
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.optimizers import own_groups
from dist_core.gradients.wrapped_state import WrappedSchedules
from dist_core.state.manifests import PARTS
from dist_core.state.parts import DIVIDED, local_of

Chunk = dict[str, Any]
"""``rows`` of a tensor ``of`` that shape, from row ``at`` on."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer as far as this process holds it."""

    tensor: torch.Tensor
    """The one that optimizers know; a DTensor where it is sharded."""
    at: int
    of: tuple[int, ...]
    """Shape of the whole."""

    @property
    def rows(self) -> torch.Tensor:
        return local_of(self.tensor)

    def chunk(self, rows: torch.Tensor) -> Chunk:
        return {"rows": rows, "at": self.at, "of": list(self.of)}


def held_whole(tensor: torch.Tensor) -> Held:
    return Held(tensor, 0, tuple(tensor.shape))


def held_shard(tensor: torch.Tensor, member: int, members: int) -> Held:
    """Return this member's shard of a tensor that torch chunks by rows."""
    total = tensor.shape[0]
    return Held(tensor, min(member * -(-total // members), total), tuple(tensor.shape))


class DividedState:
    """State of a model whose weights are divided among the processes of a replica.

    ``held``: all parameters and buffers that this process has a part of, by the model's names for them.
    """

    def __init__(
        self, held: Mapping[str, Held], optimizers: Sequence[torch.optim.Optimizer], schedules: Sequence[Any]
    ) -> None:
        self._held = held
        self._names = {id(each.tensor): name for name, each in held.items()}
        self._optimizers = optimizers
        self.schedules = WrappedSchedules(schedules)
        self.scaler: Any = None

    def adopt_scaler(self, scaler: Any) -> None:
        raise InvalidTraining(
            "a GradScaler is used with a model that is divided among several processes, but each process would "
            "choose a different scale; train in bfloat16, which needs no scaler"
        )

    def replicated(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that are the same on all processes that hold this part."""
        for each in self._held.values():
            if isinstance(each.tensor, torch.nn.Parameter):
                yield each.rows
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (local_of(each) for each in state.values() if isinstance(each, torch.Tensor))

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        return {
            DIVIDED: True,
            "weights": {name: each.chunk(each.rows) for name, each in self._held.items()},
            "optimizers": [self._saved(optimizer) for optimizer in self._optimizers],
            "lr_schedulers": self.schedules.state_dict(),
        }

    def _saved(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        state = {}
        for parameter, values in optimizer.state.items():
            held = self._held[self._names[id(parameter)]]
            state[self._names[id(parameter)]] = {key: self._saved_value(held, value) for key, value in values.items()}
        return {"groups": groups, "state": state}

    def _saved_value(self, held: Held, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == held.tensor.shape:
            return held.chunk(local_of(value))
        return value

    # ------------------------------------------------------------------ loading

    def inherit(self, state: dict[str, Any]) -> None:
        """Go on from a parent trial's state with this trial's own hyperparameters, as ``WrappedState.inherit`` does."""
        # The first part says for all of them what is not divided.
        first, *others = state.get(PARTS) or [state]
        optimizers = [
            {**theirs, "groups": own_groups(each, theirs["groups"])}
            for each, theirs in zip(self._optimizers, first["optimizers"], strict=True)
        ]
        schedules = self.schedules.inherit(first["lr_schedulers"])
        first = {**first, "optimizers": optimizers, "lr_schedulers": schedules}
        self.load_state_dict({**state, PARTS: [first, *others]})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this part's state, alone or from a checkpoint of all parts. Raises InvalidTraining for another model."""
        parts: list[dict[str, Any]] = state.get(PARTS) or [state]
        weights = [part["weights"] for part in parts]
        with torch.no_grad():
            for name, held in self._held.items():
                _put(held.rows, _rows_for(name, held, [each[name] for each in weights if name in each]))
            for index, optimizer in enumerate(self._optimizers):
                self._load(optimizer, [part["optimizers"][index] for part in parts])
        self.schedules.load(parts[0]["lr_schedulers"])

    def _load(self, optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]]) -> None:
        theirs = saved[0]["groups"]
        if len(theirs) != len(optimizer.param_groups):
            raise InvalidTraining(
                f"the trial's optimizer has {len(theirs)} parameter groups and this replica's has "
                f"{len(optimizer.param_groups)}; build the same optimizer on every replica"
            )
        for group, options in zip(optimizer.param_groups, theirs, strict=True):
            group.update(options)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names[id(parameter)]
                found = [each["state"][name] for each in saved if name in each["state"]]
                if found:
                    self._load_values(optimizer, parameter, name, found)
                else:
                    optimizer.state.pop(parameter, None)

    def _load_values(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str, saved: Sequence[dict[str, Any]]
    ) -> None:
        held, state = self._held[name], optimizer.state[parameter]
        for key, value in saved[0].items():
            if isinstance(value, dict) and "rows" in value:
                rows = _rows_for(f"{name} ({key})", held, [each[key] for each in saved])
                if key not in state:
                    state[key] = torch.zeros_like(parameter, dtype=rows.dtype)
                _put(local_of(state[key]), rows)
            elif isinstance(value, torch.Tensor):
                state[key] = value.clone()
            else:
                state[key] = value


def _put(into: torch.Tensor, rows: torch.Tensor) -> None:
    if rows.numel() and rows.data_ptr() != into.data_ptr():
        into.copy_(rows)


def _rows_for(name: str, held: Held, chunks: Sequence[Chunk]) -> torch.Tensor:
    """Return the rows that this process holds, from chunks that make the whole. Raises InvalidTraining."""
    if not chunks:
        raise InvalidTraining(
            f"the trial's model has no {name}; every replica has to build the same model, with the same names"
        )
    if tuple(chunks[0]["of"]) != held.of:
        raise InvalidTraining(
            f"{name} has the shape {tuple(chunks[0]['of'])} in the trial and {held.of} on this replica; every replica "
            "has to build the same model"
        )
    first, count = held.at, len(held.rows) if held.of else 1
    for chunk in chunks:
        if not held.of or (chunk["at"] == first and len(chunk["rows"]) == count):
            rows: torch.Tensor = chunk["rows"]
            return rows
    wanted = []
    for chunk in sorted(chunks, key=lambda each: int(each["at"])):
        low, high = max(first, chunk["at"]), min(first + count, chunk["at"] + len(chunk["rows"]))
        if low < high:
            wanted.append(chunk["rows"][low - chunk["at"] : high - chunk["at"]])
            first, count = high, first + count - high
    if count:
        raise InvalidTraining(f"the checkpoint lacks {count} rows of {name}; a part of it is missing")
    return torch.cat(wanted) if wanted else chunks[0]["rows"][:0]


def names_of_shared(model: nn.Module) -> dict[str, str]:
    """Names in its state dictionary of what is known by another of its names: weights that several modules share."""
    first: dict[int, str] = {}
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        first[id(each)] = name
    found = {name: first.get(id(each), name) for name, each in model.state_dict(keep_vars=True).items()}
    return {name: known for name, known in found.items() if name != known}


def gathered(held: Mapping[str, Held], shared: Mapping[str, str], group: ReplicaGroup) -> dict[str, torch.Tensor]:
    """Gather all of a model's weights on the CPU, for its first process; nothing for the others. Collective.

    ``held``: what this process has of them; ``shared``: by ``names_of_shared``. Raises PeerLost.
    """
    whole: dict[str, torch.Tensor] = {}
    for source in range(group.world_size):
        mine = source == group.rank
        entries: list[Any] = [_entry(name, each) for name, each in held.items()] if mine else []
        for name, at, rows, of, kind in group.broadcast_json(entries, source=source):
            if mine:
                sent = held[name].rows.detach().cpu().contiguous()
                if source != 0:
                    group.send_tensors([sent], targets=[0])
                    continue
            elif group.rank != 0:
                continue
            else:
                sent = torch.empty(rows, dtype=getattr(torch, kind))
                group.receive_tensors([sent], source=source)
            if not of:
                whole[name] = sent.clone()
            else:
                whole.setdefault(name, torch.empty(of, dtype=sent.dtype))[at : at + len(sent)] = sent
    return whole | {name: whole[known] for name, known in shared.items()} if group.rank == 0 else {}


def _entry(name: str, held: Held) -> list[Any]:
    rows = held.rows
    return [name, held.at, list(rows.shape), list(held.of), str(rows.dtype).removeprefix("torch.")]
