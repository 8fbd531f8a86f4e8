"""ServedWeights: a model whose weights a parameter server keeps, one optimizer of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dist_core.errors import InvalidTraining
from dist_core.gradients.optimizers import parameters_of
from dist_core.gradients.reduce import ParameterServer


class ServedWeights:
    def __init__(self, server: ParameterServer, optimizer: torch.optim.Optimizer) -> None:
        self._server = server
        self._optimizer = optimizer

    @property
    def staleness(self) -> int:
        """How many steps replicas may be apart."""
        return self._server.staleness

    def begin_serving(self) -> None:
        self._server.serve(self._parameters, self._optimizer)

    def push(self, correction: float) -> None:
        """Give the present gradients, ``correction`` times, and take the weights back. Raises PeerLost."""
        gradient = torch.cat(
            [
                torch.zeros(each.numel()) if each.grad is None else each.grad.detach().reshape(-1).float().cpu()
                for each in self._parameters
            ]
        ).mul_(correction)
        self._put(self._server.push(gradient, [group["lr"] for group in self._groups]))

    def pull(self) -> None:
        """Take the weights as they are."""
        self._put(self._server.pull(sum(each.numel() for each in self._parameters), len(self._groups)))

    def settle(self) -> None:
        """Where the server is in this process: weights and optimizer become what it has."""
        kept = self._server.state()
        if kept is not None:
            self._put(kept[0])
            self._optimizer.load_state_dict(kept[1])

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        """In the optimizer's order."""
        return parameters_of(self._optimizer)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def _put(self, weights: torch.Tensor) -> None:
        start = 0
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.copy_(weights[start : start + parameter.numel()].view(parameter.shape))
                start += parameter.numel()


def served_by(server: ParameterServer | None, optimizers: Sequence[torch.optim.Optimizer]) -> ServedWeights | None:
    """None where no server keeps the weights. Raises InvalidTraining."""
    if server is None:
        return None
    if len(optimizers) > 1:
        raise InvalidTraining(
            f"parameter_server keeps one optimizer and was given {len(optimizers)}; choose another reduction"
        )
    return ServedWeights(server, optimizers[0])
