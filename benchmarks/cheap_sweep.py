"""One sweep of cheap trials, plain or elastic: prints when trials ended and what the objective measured, as JSON.

``python -m benchmarks.cheap_sweep OBJECTIVE HOW STORAGE TRIALS JOBS``, in a folder of its own.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import optuna

from tuner_bridge import optimize


def square(trial: optuna.Trial) -> float:
    trial.set_user_attr("begun", time.time())
    return trial.suggest_float("x", -10, 10) ** 2


def forest(trial: optuna.Trial) -> float:
    from sklearn.datasets import load_digits
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import cross_val_score

    images, digits = load_digits(return_X_y=True)
    model = RandomForestClassifier(
        n_estimators=trial.suggest_int("trees", 10, 40), max_depth=trial.suggest_int("depth", 2, 16), random_state=0
    )
    return float(cross_val_score(model, images, digits, cv=3).mean())


def curve(trial: optuna.Trial) -> float:
    """Fifty pairs of a report and the question whether to prune."""
    x, seconds = trial.suggest_float("x", -10, 10), []
    for step in range(50):
        began = time.perf_counter()
        trial.report(x**2 / (step + 1), step)
        trial.should_prune()
        seconds.append(time.perf_counter() - began)
    trial.set_user_attr("pair_ms", 1e3 * statistics.median(seconds))
    return x**2


def main(objective: str, how: str, storage: str, trials: int, jobs: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage="sqlite:///study.db" if storage == "sqlite" else None,
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.MedianPruner() if objective == "curve" else optuna.pruners.NopPruner(),
    )
    ends: list[float] = []
    called = time.time()
    code = {"square": square, "forest": forest, "curve": curve}[objective]
    if how == "plain":
        study.optimize(code, n_trials=trials, n_jobs=jobs, callbacks=[lambda *_: ends.append(time.time())])
    else:
        optimize(study, code, n_trials=trials, n_jobs=jobs, slots=jobs, callbacks=[lambda *_: ends.append(time.time())])
    begun = study.trials[0].user_attrs.get("begun", called)
    pairs = [trial.user_attrs["pair_ms"] for trial in study.trials if "pair_ms" in trial.user_attrs]
    half = len(ends) // 2
    found = {"rate": (len(ends) - half) / (ends[-1] - ends[half - 1]), "first_line_seconds": begun - called}
    print(json.dumps({**found, "pair_ms": statistics.median(pairs) if pairs else None}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
