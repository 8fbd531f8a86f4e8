"""40 trivial trials under Ray Tune, two at a time, a process each: `python trivial_ray.py FOLDER N`."""

import sys
import time

from ray import init, tune

folder, trials = sys.argv[1], int(sys.argv[2])


def trivial(config: dict[str, object]) -> None:
    import torch  # noqa: F401

    tune.report({"value": 1.0})
    with open(f"{folder}/ends", "a") as file:
        file.write(f"{time.time()}\n")


if __name__ == "__main__":
    init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tune.Tuner(
        tune.with_resources(trivial, {"cpu": 1}),
        tune_config=tune.TuneConfig(num_samples=trials, max_concurrent_trials=2, reuse_actors=False),
        run_config=tune.RunConfig(storage_path=f"{folder}/ray", verbose=0),
    ).fit()
