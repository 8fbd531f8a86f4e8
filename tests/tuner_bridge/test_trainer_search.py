"""A search over a trainer of Hugging Face's: its values are the trainer's own, and any pruner sees its evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from tests.support import trainers
from tests.support.hugging_face import Tokens, accuracy, arguments, classifier
from tuner_bridge import optimize
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.optuna.trainers import TrainerMetrics

SEED = 3


class Trial:
    """What TrainerMetrics asks of one."""

    def __init__(self, *directions: Any) -> None:
        self.study = optuna.create_study(directions=directions)
        self.reports: list[tuple[float, int]] = []
        self.metrics: list[dict[str, float]] = []
        self.prunes = self.has_reported = False

    def report(self, value: float, step: int) -> None:
        self.reports.append((value, step))

    def report_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.append(metrics)

    def should_prune(self) -> bool:
        return self.prunes


METRICS = {"eval_loss": 0.5, "eval_accuracy": 0.9, "eval_runtime": 1.0, "eval_samples_per_second": 7.0, "epoch": 1.0}


@pytest.mark.parametrize(
    ("direction", "chosen", "reported"),
    [
        ("minimize", None, 0.5),
        ("maximize", None, 0.9),
        ("minimize", "eval_accuracy", 0.9),
        ("maximize", "accuracy", 0.9),
    ],
)
def test_the_metric_that_is_reported_follows_from_the_direction(
    direction: str, chosen: str | None, reported: float
) -> None:
    trial = Trial(direction)
    TrainerMetrics(trial)(METRICS, 3, chosen)
    assert trial.reports == [(reported, 3)]


@pytest.mark.parametrize(
    ("metrics", "reported"),
    [({"held_out_loss": 0.5, "error": 0.2}, 0.5), ({"error": 0.2}, 0.2), ({"val_loss": 0.4, "other_loss": 0.3}, 0.4)],
)
def test_a_study_that_minimises_takes_the_loss_or_the_only_metric(metrics: dict[str, float], reported: float) -> None:
    trial = Trial("minimize")
    TrainerMetrics(trial)(metrics, 1, None)
    assert trial.reports == [(reported, 1)]


def test_what_is_not_clear_is_not_reported() -> None:
    trial = Trial("maximize")
    TrainerMetrics(trial)({**METRICS, "eval_f1": 0.3}, 1, None)
    assert trial.reports == []


def test_several_objectives_get_all_metrics() -> None:
    trial = Trial("minimize", "maximize")
    TrainerMetrics(trial)(METRICS, 1, None)
    assert trial.metrics == [{"eval_loss": 0.5, "eval_accuracy": 0.9}]


def test_code_that_reports_for_itself_is_left_to_it() -> None:
    trial = Trial("minimize")
    trial.has_reported = True
    TrainerMetrics(trial)(METRICS, 1, None)
    assert trial.reports == []


def test_a_trial_that_is_to_be_pruned_ends() -> None:
    trial = Trial("minimize")
    trial.prunes = True
    with pytest.raises(optuna.TrialPruned, match="pruned at step 2, where it had 0"):
        TrainerMetrics(trial)(METRICS, 2, None)


def test_what_is_no_function_is_refused() -> None:
    from tuner_bridge.huggingface import search

    with pytest.raises(InvalidSweep, match=r"hp_space is \{\}; it must be a function"):
        search(trainers.make, {})  # type: ignore[arg-type]  # that is the point


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_FOLDER", str(tmp_path))


def trained_plainly(folder: str, learning_rate: float) -> float:
    """By the trainer itself, in this process."""
    import transformers

    library: Any = transformers
    trainer = library.Trainer(
        args=arguments(folder, num_train_epochs=4, save_strategy="no", learning_rate=learning_rate),
        model_init=classifier,
        train_dataset=Tokens(96),
        eval_dataset=Tokens(41, seed=1),
        compute_metrics=accuracy,
    )
    trainer.train()
    return float(trainer.evaluate()["eval_loss"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("folder")
class TestWithReplicas:
    def test_its_values_are_those_of_the_trainer(self, tmp_path: Path) -> None:
        """A search over trainings of a language model."""
        from tuner_bridge.huggingface import search

        best = search(
            trainers.make,
            trainers.space,
            compute_objective=trainers.value,
            n_trials=3,
            n_jobs=2,
            direction="minimize",
            sampler=optuna.samplers.RandomSampler(seed=SEED),
            slots=2,
            state_dir=tmp_path / "state",
        )
        assert not isinstance(best, list)
        trials = best.run_summary.get_trials()
        assert [each.state for each in trials] == [TrialState.COMPLETE] * 3
        for each in trials:
            assert sorted(each.intermediate_values) == [1, 2, 3, 4]
            assert each.intermediate_values[4] == each.value
            assert each.value == pytest.approx(trained_plainly(str(tmp_path), each.params["learning_rate"]), abs=1e-4)
        assert best.objective == best.run_summary.best_value
        assert best.hyperparameters == best.run_summary.best_params

    def test_an_objective_with_a_trainer_is_pruned_without_a_word_about_that(self, tmp_path: Path) -> None:
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=SEED),
            pruner=optuna.pruners.ThresholdPruner(lower=1.1, n_warmup_steps=2),
        )
        optimize(study, trainers.objective, 1, slots=2, state_dir=tmp_path / "state")
        [trial] = study.get_trials()
        assert trial.state == TrialState.PRUNED
        assert sorted(trial.intermediate_values) == [1, 2]

    def test_an_argument_that_there_is_not_is_named(self, tmp_path: Path) -> None:
        from tuner_bridge.huggingface import search

        with pytest.raises(InvalidSweep, match="hp_space gave 'learning_rat', which is not an argument of"):
            search(trainers.make, trainers.misspelt, n_trials=1, slots=1, state_dir=tmp_path / "state")

    def test_a_trainer_that_is_not_elastic_is_named(self, tmp_path: Path) -> None:
        from tuner_bridge.huggingface import search

        with pytest.raises(InvalidSweep, match="trainer_factory gave a Trainer, which trains on one slot only"):
            search(trainers.make_plain, trainers.space, n_trials=1, slots=1, state_dir=tmp_path / "state")

    def test_the_library_goes_by_the_variables_that_the_sweep_gives(self, tmp_path: Path) -> None:
        """It looks at them while it is imported, which is done before the first replica starts."""
        from tuner_bridge.huggingface import search

        environ = {"HF_HOME": str(tmp_path / "downloads"), "TRAINER_FOLDER": str(tmp_path)}
        study = optuna.create_study()
        options = {"n_trials": 1, "slots": 1, "state_dir": tmp_path / "state"}
        search(trainers.make, trainers.space_noting_home, study=study, environ=environ, **options)  # type: ignore[arg-type]  # of several kinds
        assert study.trials[0].user_attrs["home"] == environ["HF_HOME"]
