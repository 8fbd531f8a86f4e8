"""WrappedState: what a checkpoint holds of one wrapped model, its optimizers, schedules and scaler."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from dist_core.errors import InvalidTraining
from dist_core.gradients.frozen_weights import FrozenWeights
from dist_core.gradients.optimizers import add_group_for_script, load_optimizer, own_groups, own_schedules


class WrappedSchedules:
    """Schedules of a wrapped model's optimizers, as they are saved, loaded and inherited."""

    def __init__(self, schedules: Sequence[Any]) -> None:
        self.present = list(schedules)
        self._unclaimed_states: list[dict[str, Any]] = []
        """Saved states of schedules that are made after their model is wrapped, and have not been made yet."""
        self._inherits = False
        """True for a trial that began with its parent's state."""

    def adopt(self, schedule: Any) -> None:
        """Take one that was made after the model was wrapped as if it had been given."""
        self.present.append(schedule)
        if self._unclaimed_states:
            kept = self._unclaimed_states.pop(0)
            schedule.load_state_dict(own_schedules([schedule], [kept])[0] if self._inherits else kept)

    def state_dict(self) -> list[dict[str, Any]]:
        return [*(each.state_dict() for each in self.present), *self._unclaimed_states]

    def inherit(self, parents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what to load in place of a parent's states: its positions, with these schedules' parameters."""
        self._inherits = True
        return own_schedules(self.present, parents)

    def load(self, saved: list[dict[str, Any]]) -> None:
        """Load the schedules' states; raise InvalidTraining if the trial had fewer."""
        if len(saved) < len(self.present):
            raise InvalidTraining(
                f"the trial was saved with {len(saved)} learning rate schedules but now has {len(self.present)}; "
                "give the same schedules, or start a new trial"
            )
        for schedule, each in zip(self.present, saved, strict=False):
            schedule.load_state_dict(each)
        self._unclaimed_states = saved[len(self.present) :]


class WrappedState:
    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedules: Sequence[Any],
        scaler: Any,
        frozen: FrozenWeights | None = None,
    ) -> None:
        """``frozen``: weights that are no part of it."""
        self._module = module
        self._frozen = frozen
        self._optimizers = optimizers
        self.schedules = WrappedSchedules(schedules)
        self.scaler = scaler
        self._kept_scaler: dict[str, Any] | None = None
        """Saved state of a scaler that this process has not seen at work yet."""

    # ------------------------------------------------------------------ what comes later

    def adopt_scaler(self, scaler: Any) -> None:
        self.scaler = scaler
        self._load_scaler()

    # ------------------------------------------------------------------ saving and loading

    def replicated(self) -> Iterator[torch.Tensor]:
        """Weights, and the optimizers' state of them."""
        yield from self._module.parameters()
        for state in (state for each in self._optimizers for state in each.state.values()):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.numel())

    def state_dict(self) -> dict[str, Any]:
        module: dict[str, Any] = self._module.state_dict()
        left_out: dict[str, int] = {}
        if self._frozen is not None:
            module, left_out = self._frozen.without(module)
        state = {
            "module": module,
            "frozen": left_out,
            "optimizers": [each.state_dict() for each in self._optimizers],
            "groups": [self._names_by_group(each) for each in self._optimizers],
            "parameters": self._signature(),
            "lr_schedulers": self.schedules.state_dict(),
        }
        if self.scaler is not None:
            state["mp_scaler"] = self.scaler.state_dict()
        return state

    def inherit(self, state: dict[str, Any]) -> None:
        """Go on from a parent trial's state with this trial's own hyperparameters.

        Weights, the optimizers' moments and the schedules' positions are the parent's. Learning rates, betas, decays
        and what else the script gave its optimizers and schedules stay; a learning rate that a schedule has moved is
        moved by the same factor. Raises InvalidTraining, naming the first tensor that differs, for another model.
        """
        mine = self._signature()
        different = [pair for pair in zip(mine, state["parameters"], strict=False) if pair[0] != pair[1]]
        if (different or len(mine) != len(state["parameters"])) and not self._follows(state["parameters"]):
            what = f"{different[0][0]!r} here and {different[0][1]!r} in its parent" if different else "missing in one"
            raise InvalidTraining(
                f"a trial that begins with its parent's state needs the parent's model, but a tensor is {what}. Change "
                "only parameters that leave the model's shape as it is, or begin without a parent"
            )
        self._add_groups(state)
        optimizers = [
            {**theirs, "param_groups": own_groups(each, theirs["param_groups"])} if "param_groups" in theirs else theirs
            for each, theirs in zip(self._optimizers, state["optimizers"], strict=True)
        ]
        schedules = self.schedules.inherit(state["lr_schedulers"])
        self.load_state_dict({**state, "optimizers": optimizers, "lr_schedulers": schedules})
        for schedule in self.schedules.present:
            if hasattr(schedule, "_last_lr"):
                schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the trial's state; raise InvalidTraining if its model or schedules differ from this replica's."""
        self._refuse_another_model(state["parameters"])
        # Of checkpoints of earlier versions nothing is left out.
        left_out = state.get("frozen", {})
        if left_out:
            (self._frozen or FrozenWeights(self._module)).check(left_out)
        self._load_module(state["module"], left_out.keys())
        self._add_groups(state)
        for mine, theirs in zip(self._optimizers, state["optimizers"], strict=True):
            load_optimizer(mine, theirs)
        self.schedules.load(state["lr_schedulers"])
        self._kept_scaler = state.get("mp_scaler")
        self._load_scaler()

    def _names_by_group(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of each group's parameters; empty for one that is none of the module's."""
        names = {id(each): name for name, each in self._module.named_parameters()}
        return [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]

    def _add_groups(self, state: dict[str, Any]) -> None:
        """Add the groups of parameters that the script has added in an epoch which this process has not trained."""
        present = dict(self._module.named_parameters())
        for optimizer, theirs, names in zip(
            self._optimizers, state["optimizers"], state.get("groups", ()), strict=False
        ):
            count = len(optimizer.param_groups)
            for group, of_group in zip(theirs.get("param_groups", ())[count:], names[count:], strict=False):
                missing = [name for name in of_group if name not in present]
                if missing:
                    raise InvalidTraining(
                        f"{type(optimizer).__name__} has {count} groups of parameters here and {len(names)} in the "
                        "trial, of which one has parameters that are not the model's. Add all groups before the loop "
                        "over epochs, with a learning rate of 0 where they are to wait"
                    )
                add_group_for_script(optimizer, {**group, "params": [present[name] for name in of_group]})

    def _signature(self) -> list[str]:
        """Return a text for each trainable parameter, in order: replicas reduce them by position."""
        return [_signed(name, each) for name, each in self._module.named_parameters() if each.requires_grad]

    def _follows(self, theirs: list[str]) -> bool:
        """Train the weights that the trial trains, if this model has them: some may have been frozen or unfrozen."""
        present = {_signed(name, each): each for name, each in self._module.named_parameters()}
        if [signed for signed in present if signed in set(theirs)] != theirs:
            return False
        for signed, each in present.items():
            each.requires_grad_(signed in theirs)
        return True

    def _refuse_another_model(self, theirs: list[str]) -> None:
        own = self._signature()
        if own == theirs or self._follows(theirs):
            return
        index = next((i for i, pair in enumerate(zip(own, theirs, strict=False)) if pair[0] != pair[1]), None)
        difference = (
            f"this replica has {len(own)} parameters, the trial has {len(theirs)}"
            if index is None
            else f"parameter {index} is {own[index]!r} here and {theirs[index]!r} in the trial"
        )
        raise InvalidTraining(
            f"the model's parameters differ from the trial's: {difference}. Every replica must build the same model "
            "in the same order; look for sets, file listings or random choices in the code that builds it"
        )

    def _load_module(self, state: dict[str, torch.Tensor], left_out: Collection[str]) -> None:
        """Copy what is not in place already: a joiner receives weights where they belong, a survivor keeps its own."""
        if left_out:
            missing = self._module.state_dict().keys() - state.keys() - set(left_out)
            if missing:
                raise InvalidTraining(
                    f"the trial's model has no {min(missing)!r}; every replica has to build the same model"
                )
        present = self._module.state_dict()
        in_place = all(
            isinstance(value, torch.Tensor) and name in present and value.data_ptr() == present[name].data_ptr()
            for name, value in state.items()
        )
        if not in_place:
            # All of it: hooks of modules take what is missing for a checkpoint of an older version.
            self._module.load_state_dict(state, strict=not left_out)

    def _load_scaler(self) -> None:
        if self.scaler is not None and self._kept_scaler is not None:
            self.scaler.load_state_dict(self._kept_scaler)
            self._kept_scaler = None


def _signed(name: str, parameter: torch.nn.Parameter) -> str:
    return f"{name} {tuple(parameter.shape)}"
