"""``search``: as ``Trainer.hyperparameter_search``, each trial an elastic job, with any sampler of Optuna's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optuna

from tuner_bridge.errors import InvalidSweep
from tuner_bridge.optuna.optimize import optimize
from tuner_bridge.optuna.trainers import TrainerSearch


class BestRun(NamedTuple):
    """As transformers' own: the trial's number, its objective, its hyperparameters, and the study."""

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: optuna.Study


def search(
    trainer_factory: Callable[[], Any],
    hp_space: Callable[[Any], Mapping[str, Any]],
    *,
    compute_objective: Callable[[Mapping[str, float]], float | Sequence[float]] | None = None,
    n_trials: int = 20,
    direction: str | Sequence[str] = "minimize",
    study: optuna.Study | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
    study_name: str | None = None,
    storage: Any = None,
    load_if_exists: bool = False,
    **options: Any,
) -> BestRun | list[BestRun]:
    """Search for hyperparameters of the trainer that ``trainer_factory`` makes, an elastic one.

    ``hp_space`` gives the arguments of a trial by name, as for ``Trainer.hyperparameter_search``; so does
    ``compute_objective`` its value from the metrics of an evaluation (None: the sum of the metrics, or the loss where
    there are none). Further options are those of ``tuner_bridge.optimize``. Gives the best run, or those that no
    other one is better than, where there are several directions.

    Raises InvalidSweep for what is no such function, and what ``optimize`` raises.
    """
    if study is None:
        study = optuna.create_study(
            directions=[direction] if isinstance(direction, str) else direction,  # type: ignore[list-item, arg-type]  # a name has been told from a list
            sampler=sampler,
            pruner=pruner,
            study_name=study_name,
            storage=storage,
            load_if_exists=load_if_exists,
        )
    what = TrainerSearch(
        trainer=_callable(trainer_factory, "trainer_factory"),
        space=_callable(hp_space, "hp_space"),
        objective=None if compute_objective is None else _callable(compute_objective, "compute_objective"),
    )
    optimize(study, what, n_trials, **options)
    best = [
        BestRun(str(each.number), each.value if len(study.directions) == 1 else list(each.values), each.params, study)  # type: ignore[arg-type]  # it is complete
        for each in ([study.best_trial] if len(study.directions) == 1 else study.best_trials)
    ]
    return best[0] if len(study.directions) == 1 else best


def _callable(given: Any, name: str) -> Callable[..., Any]:
    if not callable(given):
        raise InvalidSweep(f"{name} is {given!r}; it must be a function")
    found: Callable[..., Any] = given
    return found
