"""Population based training under Ray Tune: `python population_ray.py FOLDER`.

FOLDER/problem.json has the problem. Prints the best accuracy, the seconds of the sweep, and those between a loser's
last step and the first step of what takes its place.
"""

import importlib
import json
import sys
import time
from pathlib import Path

import numpy as np
from ray import init, tune
from ray.tune.schedulers import PopulationBasedTraining
from ray.tune.schedulers.pb2 import PB2

folder = Path(sys.argv[1])
PROBLEM = json.loads((folder / "problem.json").read_text())
# Beside this script.
problem = importlib.import_module(PROBLEM["name"])


class Member(tune.Trainable):  # type: ignore[misc]  # Ray is installed elsewhere
    """A member's clock, and the ballast that its checkpoints have."""

    restored = False

    def setup(self, config: dict[str, float]) -> None:
        self.ballast = np.ones(PROBLEM["megabytes"] * 2**20, dtype=np.uint8)
        self.reset_config(config)

    def begin(self) -> None:
        raise NotImplementedError

    def train_an_epoch(self) -> float:
        raise NotImplementedError

    def step(self) -> dict[str, float | bool]:
        began = time.time()
        time.sleep(PROBLEM["seconds"])
        accuracy = self.train_an_epoch()
        self.epoch += 1
        restored, self.restored = self.restored, False
        return {
            "accuracy": accuracy,
            "done": self.epoch == PROBLEM["epochs"],
            "began": began,
            "ended": time.time(),
            "restored": restored,
        }

    def reset_config(self, new_config: dict[str, float]) -> bool:
        """Begin anew: an actor goes from one member to another, which may have no checkpoint yet."""
        self.rate = new_config["lr"]
        self.epoch = 0
        self.restored = False
        self.begin()
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        np.save(Path(checkpoint_dir) / "ballast.npy", self.ballast)
        (Path(checkpoint_dir) / "epoch.json").write_text(json.dumps(self.epoch))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.ballast = np.load(Path(checkpoint_dir) / "ballast.npy")
        self.epoch = json.loads((Path(checkpoint_dir) / "epoch.json").read_text())
        self.restored = True


class MovingOptimum(Member):
    def begin(self) -> None:
        self.accuracy = 0.0
        self.random = np.random.default_rng((PROBLEM["seed"], hash(self.trial_id) % 2**31))

    def train_an_epoch(self) -> float:
        self.accuracy = problem.step(self.accuracy, self.rate, self.random)
        return self.accuracy

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        super().save_checkpoint(checkpoint_dir)
        (Path(checkpoint_dir) / "accuracy.json").write_text(json.dumps(self.accuracy))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        super().load_checkpoint(checkpoint_dir)
        self.accuracy = json.loads((Path(checkpoint_dir) / "accuracy.json").read_text())


class SmallConvnet(Member):
    def begin(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.data, self.test = problem.digits()
        self.model = problem.network(PROBLEM["seed"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=0.9)

    def train_an_epoch(self) -> float:
        from torch.nn.functional import cross_entropy
        from torch.utils.data import DataLoader

        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        for x, y in DataLoader(self.data, batch_size=problem.BATCH, shuffle=True):
            self.optimizer.zero_grad()
            cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        return float(problem.accuracy(self.model, self.test))

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        import torch

        super().save_checkpoint(checkpoint_dir)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, Path(checkpoint_dir) / "state.pt")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        import torch

        super().load_checkpoint(checkpoint_dir)
        state = torch.load(Path(checkpoint_dir) / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Gaps(tune.Callback):  # type: ignore[misc]  # Ray has no types here
    """Notes the time between two steps of a trial where it was restored in between."""

    def __init__(self) -> None:
        self.ended: dict[str, float] = {}
        self.gaps: list[float] = []

    def on_trial_result(self, iteration, trials, trial, result, **info):  # type: ignore[no-untyped-def]  # as Ray calls it
        if result["restored"] and trial.trial_id in self.ended:
            self.gaps.append(result["began"] - self.ended[trial.trial_id])
        self.ended[trial.trial_id] = result["ended"]


def scheduler_of(explore: str) -> PopulationBasedTraining:
    options = {
        "time_attr": "training_iteration",
        "perturbation_interval": PROBLEM["every"],
        "quantile_fraction": 0.25,
    }
    lowest, highest = problem.LOWEST_RATE, problem.HIGHEST_RATE
    if explore == "pb2":
        return PB2(**options, hyperparam_bounds={"lr": [lowest, highest]})
    space = (tune.loguniform if PROBLEM["logarithmic"] else tune.uniform)(lowest, highest)
    return PopulationBasedTraining(**options, resample_probability=0.25, hyperparam_mutations={"lr": space})


if __name__ == "__main__":
    init(num_cpus=PROBLEM["slots"], include_dashboard=False, log_to_driver=False)
    gaps = Gaps()
    began = time.time()
    member = SmallConvnet if PROBLEM["name"] == "small_convnet" else MovingOptimum
    results = tune.Tuner(
        tune.with_resources(member, {"cpu": 1}),
        param_space={"lr": tune.grid_search(PROBLEM["rates"])},
        tune_config=tune.TuneConfig(
            metric="accuracy", mode="max", scheduler=scheduler_of(PROBLEM["explore"]), reuse_actors=True
        ),
        run_config=tune.RunConfig(storage_path=str(folder / "ray"), verbose=0, callbacks=[gaps]),
    ).fit()
    ended = time.time()
    best = max(result.metrics["accuracy"] for result in results)
    print(json.dumps({"best": best, "seconds": ended - began, "gaps": gaps.gaps}))
