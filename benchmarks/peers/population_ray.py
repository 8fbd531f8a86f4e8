"""Population based training under Ray Tune: `python population_ray.py FOLDER`.

FOLDER/problem.json has the problem. Prints the best accuracy, the seconds of the sweep, and those between a loser's
last step and the first step of what takes its place.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from moving_optimum import HIGHEST_RATE, LOWEST_RATE, step  # type: ignore[import-not-found]  # beside this script
from ray import init, tune
from ray.tune.schedulers import PopulationBasedTraining

folder = Path(sys.argv[1])
PROBLEM = json.loads((folder / "problem.json").read_text())


class Member(tune.Trainable):  # type: ignore[misc]  # Ray is installed elsewhere
    def setup(self, config: dict[str, float]) -> None:
        self.rate = config["lr"]
        self.accuracy, self.epoch = 0.0, 0
        self.ballast = np.ones(PROBLEM["megabytes"] * 2**20, dtype=np.uint8)
        self.random = np.random.default_rng((PROBLEM["seed"], hash(self.trial_id) % 2**31))
        self.restored = False

    def step(self) -> dict[str, float | bool]:
        began = time.time()
        time.sleep(PROBLEM["seconds"])
        self.accuracy = step(self.accuracy, self.rate, self.random)
        self.epoch += 1
        restored, self.restored = self.restored, False
        return {
            "accuracy": self.accuracy,
            "done": self.epoch == PROBLEM["epochs"],
            "began": began,
            "ended": time.time(),
            "restored": restored,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        np.save(Path(checkpoint_dir) / "ballast.npy", self.ballast)
        (Path(checkpoint_dir) / "state.json").write_text(json.dumps([self.accuracy, self.epoch]))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.ballast = np.load(Path(checkpoint_dir) / "ballast.npy")
        self.accuracy, self.epoch = json.loads((Path(checkpoint_dir) / "state.json").read_text())
        self.restored = True

    def reset_config(self, new_config: dict[str, float]) -> bool:
        self.rate = new_config["lr"]
        return True


class Gaps(tune.Callback):  # type: ignore[misc]
    """Notes the time between two steps of a trial where it was restored in between."""

    def __init__(self) -> None:
        self.ended: dict[str, float] = {}
        self.gaps: list[float] = []

    def on_trial_result(self, iteration, trials, trial, result, **info):  # type: ignore[no-untyped-def]
        if result["restored"] and trial.trial_id in self.ended:
            self.gaps.append(result["began"] - self.ended[trial.trial_id])
        self.ended[trial.trial_id] = result["ended"]


if __name__ == "__main__":
    init(num_cpus=PROBLEM["slots"], include_dashboard=False, log_to_driver=False)
    drawn = np.random.default_rng(PROBLEM["seed"]).uniform(LOWEST_RATE, HIGHEST_RATE, PROBLEM["members"])
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=PROBLEM["every"],
        quantile_fraction=0.25,
        resample_probability=0.25,
        hyperparam_mutations={"lr": tune.uniform(LOWEST_RATE, HIGHEST_RATE)},
    )
    gaps = Gaps()
    began = time.time()
    results = tune.Tuner(
        tune.with_resources(Member, {"cpu": 1}),
        param_space={"lr": tune.grid_search([float(each) for each in drawn])},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(folder / "ray"), verbose=0, callbacks=[gaps]),
    ).fit()
    ended = time.time()
    best = max(result.metrics["accuracy"] for result in results)
    print(json.dumps({"best": best, "seconds": ended - began, "gaps": gaps.gaps}))
