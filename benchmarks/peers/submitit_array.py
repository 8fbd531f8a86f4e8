"""The sweep of `benchmarks.slurm_queue` as people run it with submitit: an array of jobs, a job a trial.

Arguments: a folder with sweep.json, and how many jobs may run at a time. Each job asks Optuna for a configuration over
a journal in that folder, reports each epoch, and ends where successive halving says so. Prints how long it took, as
JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import submitit


def job(folder: str) -> None:
    import optuna

    described = json.loads((Path(folder) / "sweep.json").read_text())
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial: optuna.Trial) -> float:
        row = trial.suggest_int("configuration", 0, len(described["values"]) - 1)
        for epoch, value in enumerate(described["values"][row]):
            time.sleep(described["epoch_seconds"])
            trial.report(value, epoch + 1)
            if trial.should_prune():
                raise optuna.TrialPruned
        return float(described["values"][row][-1])

    study_of(folder, described["keep_one_in"]).optimize(objective, n_trials=1)


def study_of(folder: str, keep_one_in: int):  # type: ignore[no-untyped-def]  # submitit has no types here
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return optuna.create_study(
        study_name="sweep",
        storage=JournalStorage(JournalFileBackend(str(Path(folder) / "journal"))),
        direction="maximize",
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=keep_one_in),
        load_if_exists=True,
    )


def main() -> None:
    folder, at_a_time = sys.argv[1], int(sys.argv[2])
    described = json.loads((Path(folder) / "sweep.json").read_text())
    study = study_of(folder, described["keep_one_in"])
    for row in range(len(described["values"])):
        study.enqueue_trial({"configuration": row})
    executor = submitit.AutoExecutor(folder=str(Path(folder) / "jobs"))
    executor.update_parameters(
        timeout_min=60, gpus_per_node=1, slurm_partition="main", slurm_array_parallelism=at_a_time
    )
    began = time.time()
    with executor.batch():
        jobs = [executor.submit(job, folder) for _ in described["values"]]
    for each in jobs:
        each.result()
    done = [trial for trial in study.trials if trial.state.is_finished()]
    print(json.dumps({"makespan": time.time() - began, "trials": len(done)}))


if __name__ == "__main__":
    main()
