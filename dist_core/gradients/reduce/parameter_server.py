"""Asynchronous training with bounded staleness: each replica pushes its gradient and goes on with the newest weights.

Rank 0 keeps the weights and the optimizer, with a thread for each other replica. That divides the work with nobody, so
it suits few replicas of uneven speed, and baselines. A push is the replica's share of the global batch: a batch moves
the weights as far as one synchronous step would, in as many moves as there are replicas. No replica is more than
``staleness`` steps ahead of the slowest (stale synchronous parallel, Ho et al., NIPS'13), and gradients that are older
than the other replicas' single pushes explain count less, by 1 / (1 + steps too old).

Statistics of gradients assume synchronous steps: neither the noise scale is measured nor does the batch size adapt.
Momentum decays with each push. A replica that dies takes with it the pushes that the furthest survivor has not seen,
and the optimizer's momentum if it was rank 0.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dist_core.errors import InvalidTraining, PeerLost
from dist_core.generations.group_needs import GroupNeeds
from dist_core.generations.process_groups import ReplicaGroup
from dist_core.gradients.reduce.contract import Bucket, ReducedBucket, completed

_PUSH, _PULL, _STOP = 1.0, 2.0, 0.0


class ParameterServer:
    name = "parameter_server"
    exact = False
    comparable = False
    reads_layout = False
    needs = GroupNeeds(extra_on_host=True)

    def __init__(self, staleness: int = 2) -> None:
        if staleness < 1:
            raise InvalidTraining(
                f"staleness of parameter_server is {staleness}; it must be at least 1 step, or use all_reduce"
            )
        self.staleness = staleness
        self._group: ReplicaGroup | None = None
        self._server: _Server | None = None
        self._num_rates = 1

    def reduce(self, bucket: Bucket) -> ReducedBucket:
        """Gradients stay with their replica until they are pushed."""
        return completed(bucket.buffer)

    def enter(self, group: ReplicaGroup) -> None:
        self._stop()
        self._server = None
        self._group = group if group.world_size > 1 and group.extra_on_host else None

    def serve(self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """On entering a generation: rank 0 keeps weights and optimizer state from now on."""
        self._num_rates = len(optimizer.param_groups)
        if self._group is not None and self._group.rank == 0:
            self._server = _Server(parameters, optimizer, self._group.world_size)
            for rank in range(1, self._group.world_size):
                arguments = (self._group.extra_on_host[0], rank, len(optimizer.param_groups))
                threading.Thread(
                    target=self._server.answer, args=arguments, name=f"elastune-server-{rank}", daemon=True
                ).start()

    def push(self, gradient: torch.Tensor, rates: Sequence[float]) -> torch.Tensor:
        """Apply this replica's gradient; the newest weights, flat. Raises PeerLost when rank 0 is gone."""
        if self._server is not None:
            return self._server.push(gradient, rates, rank=0)
        return self._ask(_PUSH, gradient, rates)

    def pull(self, size: int, num_groups: int) -> torch.Tensor:
        """The newest weights, flat."""
        if self._server is not None:
            return self._server.pull(rank=0)
        return self._ask(_PULL, torch.zeros(size), [0.0] * num_groups)

    def state(self) -> tuple[torch.Tensor, dict[str, Any]] | None:
        """On rank 0, the newest weights and the optimizer's state."""
        return None if self._server is None else self._server.state()

    def _ask(self, command: float, gradient: torch.Tensor, rates: Sequence[float]) -> torch.Tensor:
        assert self._group is not None
        channel, tag = self._group.extra_on_host[0], 2 * self._group.rank
        weights = torch.empty_like(gradient)

        def exchange() -> None:
            channel.send([torch.tensor([command, *rates], dtype=torch.float64)], 0, tag).wait()
            if command == _PUSH:
                channel.send([gradient], 0, tag + 1).wait()
            channel.recv([weights], 0, tag).wait()

        try:
            self._group.fuse.run(exchange)
        except RuntimeError as error:
            raise PeerLost(f"the replica that keeps the weights vanished: {error}") from error
        return weights

    def _stop(self) -> None:
        """Tell the server's thread of this replica that it is over; whether it still hears does not matter."""
        if self._group is None or self._group.rank == 0:
            return
        with contextlib.suppress(RuntimeError):
            word = torch.tensor([_STOP, *([0.0] * self._num_rates)], dtype=torch.float64)
            self._group.extra_on_host[0].send([word], 0, 2 * self._group.rank)


class _Server:
    """The weights and the optimizer of all replicas. Its methods may be called from any thread."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer, world_size: int
    ) -> None:
        self._lock = threading.Lock()
        order = {id(parameter): index for index, parameter in enumerate(parameters)}
        # One copy of the optimizer brings copies of its parameters along.
        self._optimizer = copy.deepcopy(optimizer)
        self._optimizer._optimizer_step_post_hooks.clear()
        self._optimizer._optimizer_step_pre_hooks.clear()
        own: dict[int, torch.nn.Parameter] = {}
        for theirs, mine in zip(optimizer.param_groups, self._optimizer.param_groups, strict=True):
            for before, after in zip(theirs["params"], mine["params"], strict=True):
                own[order[id(before)]] = after
        self._parameters = [own[index] for index in sorted(own)]
        self._world_size = world_size
        self._version = 0
        self._seen = [0] * world_size

    def push(self, gradient: torch.Tensor, rates: Iterable[float], *, rank: int) -> torch.Tensor:
        with self._lock:
            # One push of each other replica is what synchronous steps would have had in between as well.
            too_old = max(0, self._version - self._seen[rank] - (self._world_size - 1)) / self._world_size
            scale = 1.0 / (1.0 + too_old)
            start = 0
            for parameter in self._parameters:
                stop = start + parameter.numel()
                parameter.grad = gradient[start:stop].view(parameter.shape)
                start = stop
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
            type(self._optimizer).step(self._optimizer)
            self._version += 1
            return self._flat(rank)

    def pull(self, *, rank: int) -> torch.Tensor:
        with self._lock:
            return self._flat(rank)

    def state(self) -> tuple[torch.Tensor, dict[str, Any]]:
        with self._lock:
            return self._flat(0), copy.deepcopy(self._optimizer.state_dict())

    def _flat(self, rank: int) -> torch.Tensor:
        self._seen[rank] = self._version
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])

    def answer(self, channel: dist.ProcessGroup, rank: int, num_groups: int) -> None:
        """Serve one replica until it leaves or dies."""
        torch.set_num_threads(1)
        size = sum(parameter.numel() for parameter in self._parameters)
        word = torch.empty(1 + num_groups, dtype=torch.float64)
        gradient = torch.empty(size)
        try:
            while True:
                channel.recv([word], rank, 2 * rank).wait()
                if word[0] == _STOP:
                    return
                if word[0] == _PUSH:
                    channel.recv([gradient], rank, 2 * rank + 1).wait()
                    weights = self.push(gradient, word[1:].tolist(), rank=rank)
                else:
                    weights = self.pull(rank=rank)
                channel.send([weights], rank, 2 * rank).wait()
        except RuntimeError:
            # It is gone, or this generation is; the control reduction tells the trial.
            return
