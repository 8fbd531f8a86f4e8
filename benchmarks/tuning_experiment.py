"""Pollux's own tuning experiment in virtual time (OSDI'21, table 3): 100 trials of TPE, ResNet18 on CIFAR-10, 16 slots.

The peers give each of 4 trials at a time 4 slots, as the paper's static cluster: once with the batch size that the
learning rate is stated for (128), once with the one that is fastest there (512). Ours adapts size and batch, with 4
trials at a time and with 16. What a trial comes to depends on its parameters by a smooth function with noise, the same
for all; its trainings follow what Pollux's authors measured (ELASTUNE_POLLUX_TRACES). On two DGX-A100 the paper had
10 h against 14 h, and 25 against 34 minutes a trial.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
from pathlib import Path

import numpy as np
import optuna

from benchmarks.frame import Measurement
from scheduler.simulator.application import Application, measured_application
from scheduler.simulator.cluster import SimulationSettings
from scheduler.simulator.rivals import compared_policy
from scheduler.simulator.workload import Submission
from scheduler.simulator.world import World
from scheduler.snapshot import Policy
from trials.record import Outcome

TRIALS = 100
SEEDS = 5


class TunedWorld(World):
    """The tuner is Optuna's TPE, which learns of a trial when it has ended."""

    def __init__(
        self,
        application: Application,
        policy: Policy,
        settings: SimulationSettings,
        *,
        at_a_time: int,
        batch_size: int,
        seed: int,
    ) -> None:
        super().__init__((), policy, settings)
        self._job = Submission(name="", at=0.0, application=application, num_replicas=4, batch_size=batch_size)
        self._at_a_time = at_a_time
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        self._chance = np.random.default_rng(seed)
        self._asked: dict[str, optuna.Trial] = {}
        self._waiting = [self._job] * TRIALS
        self.accuracies: list[float] = []

    def _submit_due(self) -> None:
        while self._waiting and len(self.trainings) < self._at_a_time:
            self._waiting.pop()
            name = str(TRIALS - len(self._waiting))
            self._asked[name] = self._study.ask()
            self._submit(
                Submission(
                    name=name,
                    at=self.now,
                    application=self._job.application,
                    num_replicas=self._job.num_replicas,
                    batch_size=self._job.batch_size,
                )
            )

    def _study_of(self, submission: Submission) -> str:
        return "tuned"

    def _end(self, trial_id: str, outcome: Outcome, at: float) -> None:
        trial = self._asked.pop(self.trainings[trial_id].submission.name)
        self.accuracies.append(self._accuracy(trial))
        self._study.tell(trial, self.accuracies[-1])
        super()._end(trial_id, outcome, at)

    def _accuracy(self, trial: optuna.Trial) -> float:
        rate = math.log10(trial.suggest_float("learning_rate", 1e-4, 1.0, log=True))
        decay = math.log10(trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True))
        momentum = trial.suggest_float("momentum", 0.5, 0.99)
        away = 0.02 * (rate + 1.0) ** 2 + 0.004 * (decay + 3.3) ** 2 + 0.05 * (momentum - 0.9) ** 2
        return max(0.1, 0.955 - away + float(self._chance.normal(0.0, 0.001)))


def measure() -> list[Measurement]:
    logging.disable(logging.ERROR)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if "ELASTUNE_POLLUX_TRACES" not in os.environ:
        print("set ELASTUNE_POLLUX_TRACES to the folder of Pollux's measurements; nothing was run")
        return []
    application = measured_application(Path(os.environ["ELASTUNE_POLLUX_TRACES"]) / "cifar10")

    def run(policy: str, request: str, at_a_time: int, batch_size: int) -> dict[str, float]:
        found: dict[str, list[float]] = {"makespan": [], "average trial": [], "top-5 accuracy": []}
        for seed in range(SEEDS):
            settings = SimulationSettings(nodes=4, slots_per_node=4, decide_every_seconds=15.0, request=request)  # type: ignore[arg-type]  # one of its words
            world = TunedWorld(
                application,
                compared_policy(policy),
                settings,
                at_a_time=at_a_time,
                batch_size=batch_size,
                seed=seed,
            )
            result = world.run()
            found["makespan"].append(result.makespan_seconds / 3600.0)
            found["average trial"].append(statistics.fmean(job.completion_seconds for job in result.jobs) / 3600.0)
            found["top-5 accuracy"].append(statistics.fmean(sorted(world.accuracies)[-5:]))
        return {name: statistics.fmean(values) for name, values in found.items()}

    peers = {
        "static 4 slots, batch 128": run("fifo", "rigid", 4, 128),
        "static 4 slots, batch 512": run("fifo", "rigid", 4, 512),
    }
    ours = {at_a_time: run("goodput", "elastic", at_a_time, 128) for at_a_time in (4, 16)}
    rows = []
    for at_a_time, mine in ours.items():
        for peer, other in peers.items():
            first = peer.endswith("128") and at_a_time == 4
            for what, target in (("makespan", 0.6), ("average trial", 0.65)):
                rows.append(
                    Measurement(
                        what=f"{what}, {at_a_time} trials at a time",
                        ours=mine[what],
                        peer=other[what],
                        unit="h",
                        peer_name=peer,
                        target=target if first else None,
                        details={"top_5_accuracy": [mine["top-5 accuracy"], other["top-5 accuracy"]]},
                    )
                )
    return rows
