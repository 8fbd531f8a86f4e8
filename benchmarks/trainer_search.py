"""A search with `search` against `Trainer.hyperparameter_search` with Optuna: what a trial takes on one slot.

The same small BERT, space, sampler and number of trials, none of them pruned, each search in a process of its own, in
turns. Theirs trains in the process that searches; ours in a replica, with a scheduler beside it. A trial takes from the
moment that it asks for its parameters to the moment that the next one does; beside it stands the whole search, with
what ours spends on a scheduler and a second import of the libraries.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.frame import Measurement

RUNS = 3
TRIALS = 10
TIMES = "BENCHMARK_TRIALS_BEGAN"
"""Names the file in which trials note when they begin."""


def noted_space(trial: Any) -> dict[str, Any]:
    from examples.text_classification import space

    with open(os.environ[TIMES], "a") as file:
        file.write(f"{time.time()}\n")
    return space(trial)


def searched(kind: str) -> dict[str, float]:
    """Seconds of a search and of each of its trials, and the best value it found."""
    import optuna
    import transformers

    # Replicas find it by this name; here it may be __main__'s.
    from benchmarks.trainer_search import noted_space
    from examples.text_classification import make, model_init, objective

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    transformers.logging.set_verbosity_error()
    options: dict[str, Any] = {"compute_objective": objective, "direction": "maximize", "n_trials": TRIALS}
    options |= {"sampler": optuna.samplers.RandomSampler(seed=0), "pruner": optuna.pruners.NopPruner()}
    began = time.perf_counter()
    if kind == "ours":
        from tuner_bridge.huggingface import search

        best: Any = search(make, noted_space, slots=1, n_jobs=1, **options)
    else:
        from dist_core.huggingface import ElasticTrainer

        library: Any = transformers
        plain = make()
        trainer = library.Trainer(
            args=plain.args,
            model_init=model_init,
            train_dataset=plain.train_dataset,
            eval_dataset=plain.eval_dataset,
            compute_metrics=plain.compute_metrics,
        )
        assert not isinstance(trainer, ElasticTrainer)
        best = trainer.hyperparameter_search(noted_space, backend="optuna", **options)
    seconds = time.perf_counter() - began
    first, *_, last = map(float, Path(os.environ[TIMES]).read_text().split())
    return {"seconds": seconds, "trial": (last - first) / (TRIALS - 1), "best": float(best.objective)}


def in_process(kind: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.trainer_search", kind],
            env={**os.environ, "OMP_NUM_THREADS": "1", TIMES: f"{scratch}/began"},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure() -> list[Measurement]:
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for _ in range(RUNS):
        for kind, found in runs.items():
            found.append(in_process(kind))

    def median(what: str) -> tuple[float, float]:
        ours, theirs = (statistics.median(each[what] for each in runs[kind]) for kind in ("ours", "theirs"))
        return ours, theirs

    rows = []
    for what, words in (("trial", "a trial of a search"), ("seconds", f"a whole search of {TRIALS} trials")):
        ours, theirs = median(what)
        rows.append(
            Measurement(
                what=f"{words}, a small BERT on one slot",
                ours=ours,
                peer=theirs,
                unit="s",
                peer_name="Trainer.hyperparameter_search with Optuna",
                target=1.0 if what == "trial" else None,
                details=dict(runs),
            )
        )
    return rows


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        result = searched(sys.argv[1])
    print(json.dumps(result))
