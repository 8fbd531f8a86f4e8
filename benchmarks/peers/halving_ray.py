"""The sweep of `live_sweeps` under Ray Tune: `python halving_ray.py FOLDER [changing]`.

FOLDER/sweep.json has each configuration's values and the seconds of each epoch by number of slots. ASHA gives every
trial one slot; with ``changing`` Ray's ResourceChangingScheduler spreads free slots over the trials that run, which go
on from their checkpoints then. Prints seconds to the sweep's end and to the end of the best one that was trained whole.
"""

import json
import sys
import time
from pathlib import Path

from ray import init, tune
from ray.tune.schedulers import ASHAScheduler, ResourceChangingScheduler
from ray.tune.schedulers.resource_changing_scheduler import DistributeResources

folder = Path(sys.argv[1])
SWEEP = json.loads((folder / "sweep.json").read_text())


class Emulated(tune.Trainable):  # type: ignore[misc]  # Ray is installed elsewhere
    def setup(self, config: dict[str, int]) -> None:
        self.values = SWEEP["values"][config["configuration"]]
        self.epoch = 0

    def step(self) -> dict[str, float | bool]:
        by_slots = SWEEP["seconds"][self.epoch]
        slots = int(self.trial_resources.required_resources.get("CPU", 1))
        time.sleep(by_slots[min(slots, len(by_slots)) - 1])
        value = self.values[self.epoch]
        self.epoch += 1
        return {"value": value, "slots": slots, "at": time.time(), "done": self.epoch == len(self.values)}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "epoch.json").write_text(json.dumps(self.epoch))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.epoch = json.loads((Path(checkpoint_dir) / "epoch.json").read_text())

    def reset_config(self, new_config: dict[str, int]) -> bool:
        self.setup(new_config)
        return True


if __name__ == "__main__":
    init(num_cpus=SWEEP["slots"], include_dashboard=False, log_to_driver=False)
    length = len(SWEEP["values"][0])
    scheduler = ASHAScheduler(max_t=length + 1, grace_period=1, reduction_factor=SWEEP["keep_one_in"])
    changing = sys.argv[2:] == ["changing"]
    if changing:
        scheduler = ResourceChangingScheduler(
            base_scheduler=scheduler, resources_allocation_function=DistributeResources(add_bundles=False)
        )
    began = time.time()
    results = tune.Tuner(
        tune.with_resources(Emulated, {"cpu": 1}),
        param_space={"configuration": tune.grid_search(list(range(len(SWEEP["values"]))))},
        tune_config=tune.TuneConfig(
            metric="value",
            mode="max",
            scheduler=scheduler,
            max_concurrent_trials=SWEEP["slots"],
            # A new process for each change of resources is what Ray does then.
            reuse_actors=not changing,
        ),
        run_config=tune.RunConfig(storage_path=str(folder / "ray"), verbose=0),
    ).fit()
    ended = time.time()
    whole = [result.metrics for result in results if result.metrics["training_iteration"] == length]
    best = max(whole, key=lambda metrics: metrics["value"])
    print(
        json.dumps(
            {
                "makespan": ended - began,
                "time to best": best["at"] - began,
                "best": best["value"],
                "finished": len(whole),
                "slots": max(result.metrics["slots"] for result in results),
            }
        )
    )
