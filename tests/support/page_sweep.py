"""A sweep for looking at: two studies at once on emulated slots, in a process of their own."""

from __future__ import annotations

import os
import sys
import threading

import optuna

from tests.support.objectives import trains
from tuner_bridge import optimize


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names, trials, epochs = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]

    def run(name: str) -> None:
        study = optuna.create_study(study_name=name, sampler=optuna.samplers.RandomSampler(seed=1))
        # What is forked may end before its fork has a slot.
        environ = {"EPOCHS": epochs}
        optimize(study, trains, n_trials=trials, n_jobs=3, max_replicas=2, environ=environ, keep_states=True)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
