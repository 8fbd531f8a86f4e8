"""The same study through Optuna alone and through ours, with the same seed and one job: nothing may differ.

Every sampler, pruner and storage that comes with Optuna. The replicas are threads of this process, which ask and tell
over the scheduler's real API; at the end a sweep of each front end runs in processes.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import optuna.terminator
import pytest
from optuna.storages.journal import JournalFileBackend

from tests.support import objectives
from tests.support.ports import ReservedPort
from tests.support.postgres import postgres_server
from tuner_bridge import elastic, optimize

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = [
    pytest.mark.usefixtures("scheduler_in_process"),
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
]
SPACE: dict[str, list[str | float]] = {"x": [-3.0, 0.0, 2.0], "y": [0, 3], "kind": ["a", "b"]}

SAMPLERS: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
    "Random": lambda: optuna.samplers.RandomSampler(seed=5),
    "TPE": lambda: optuna.samplers.TPESampler(seed=5, n_startup_trials=3),
    "TPE, in groups": lambda: optuna.samplers.TPESampler(seed=5, n_startup_trials=3, multivariate=True, group=True),
    "CMA-ES": lambda: optuna.samplers.CmaEsSampler(seed=5, n_startup_trials=2, warn_independent_sampling=False),
    "GP": lambda: optuna.samplers.GPSampler(seed=5, n_startup_trials=3),
    "QMC": lambda: optuna.samplers.QMCSampler(seed=5, warn_independent_sampling=False),
    "Grid": lambda: optuna.samplers.GridSampler(SPACE, seed=5),
    "BruteForce": lambda: optuna.samplers.BruteForceSampler(seed=5),
    "NSGA-II": lambda: optuna.samplers.NSGAIISampler(seed=5, population_size=3),
    "NSGA-III": lambda: optuna.samplers.NSGAIIISampler(seed=5, population_size=3),
    "partly fixed": lambda: optuna.samplers.PartialFixedSampler({"y": 2}, optuna.samplers.TPESampler(seed=5)),
}

PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "Nop": optuna.pruners.NopPruner,
    "Median": lambda: optuna.pruners.MedianPruner(n_startup_trials=2),
    "Percentile": lambda: optuna.pruners.PercentilePruner(25.0, n_startup_trials=2),
    "SuccessiveHalving": lambda: optuna.pruners.SuccessiveHalvingPruner(reduction_factor=2),
    "SuccessiveHalving, auto": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource="auto", reduction_factor=2),
    "Hyperband": lambda: optuna.pruners.HyperbandPruner(max_resource=5, reduction_factor=2),
    "Hyperband, auto": lambda: optuna.pruners.HyperbandPruner(max_resource="auto", reduction_factor=2),
    "Patient": lambda: optuna.pruners.PatientPruner(optuna.pruners.MedianPruner(n_startup_trials=1), patience=1),
    "Threshold": lambda: optuna.pruners.ThresholdPruner(upper=0.6),
    "Wilcoxon": lambda: optuna.pruners.WilcoxonPruner(p_threshold=0.3, n_startup_steps=2),
}


def both(
    objective: Any, n_trials: int, made: Callable[[], optuna.Study], **options: Any
) -> tuple[optuna.Study, optuna.Study]:
    """The study after Optuna's ``optimize``, and another like it after ours."""
    plain, ours = made(), made()
    plain.optimize(objective, n_trials=n_trials, **options)
    optimize(ours, objective, n_trials=n_trials, **options)
    return plain, ours


def assert_alike(plain: optuna.Study, ours: optuna.Study) -> None:
    assert len(plain.trials) == len(ours.trials)
    for expected, found in zip(plain.trials, ours.trials, strict=True):
        assert found.params == expected.params
        assert found.distributions == expected.distributions
        assert found.state == expected.state
        assert found.values == expected.values
        assert found.intermediate_values == expected.intermediate_values


@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_samplers(sampler: str) -> None:
    objective = objectives.on_the_grid if sampler in ("Grid", "BruteForce") else objectives.quadratic
    if sampler in ("CMA-ES", "QMC"):
        objective = objectives.smooth
    assert_alike(*both(objective, 8, lambda: optuna.create_study(sampler=SAMPLERS[sampler]())))


@pytest.mark.parametrize("pruner", list(PRUNERS))
def test_pruners(pruner: str) -> None:
    def made() -> optuna.Study:
        # Hyperband chooses a trial's bracket by its number and the study's name.
        sampler = optuna.samplers.RandomSampler(seed=11)
        return optuna.create_study(study_name="same", sampler=sampler, pruner=PRUNERS[pruner]())

    plain, ours = both(objectives.pruned_early, 10, made)
    assert_alike(plain, ours)
    pruned = [trial for trial in ours.trials if trial.state is optuna.trial.TrialState.PRUNED]
    assert bool(pruned) == (pruner != "Nop")


@contextlib.contextmanager
def storage_of(kind: str, folder: Path) -> Iterator[Any]:
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'study.db'}"
    elif kind == "sqlite with heartbeat":
        yield optuna.storages.RDBStorage(f"sqlite:///{folder / 'b.db'}", heartbeat_interval=60, grace_period=120)
    elif kind == "journal":
        yield optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    elif kind == "postgresql":
        with postgres_server() as url:
            storage = optuna.storages.RDBStorage(url)
            yield storage
            storage.remove_session()
            storage.engine.dispose()
    else:
        with grpc_proxy(f"sqlite:///{folder / 'behind.db'}") as proxy:
            yield proxy


@contextlib.contextmanager
def grpc_proxy(url: str) -> Iterator[Any]:
    server_module = pytest.importorskip("optuna.storages._grpc.server", reason="this Optuna has no gRPC proxy")

    with ReservedPort() as port:
        server = server_module.make_server(optuna.storages.RDBStorage(url), "127.0.0.1", port)
        threading.Thread(target=server.start, daemon=True).start()
        proxy = optuna.storages.GrpcStorageProxy(host="127.0.0.1", port=port)
        proxy.wait_server_ready(timeout=20)
        yield proxy
        proxy.close()
        server.stop(grace=None).wait()


@pytest.mark.filterwarnings("ignore:Heartbeat of storage is supposed to be used")
@pytest.mark.parametrize(
    "kind",
    [
        "sqlite",
        "sqlite with heartbeat",
        "journal",
        pytest.param("grpc proxy", marks=pytest.mark.slow),
        pytest.param("postgresql", marks=pytest.mark.slow),
    ],
)
def test_storages(kind: str, tmp_path: Path) -> None:
    names = iter(["plain", "ours"])
    with storage_of(kind, tmp_path) as storage:

        def made() -> optuna.Study:
            return optuna.create_study(
                study_name=next(names),
                storage=storage,
                sampler=optuna.samplers.TPESampler(seed=2, n_startup_trials=2),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
            )

        plain, ours = both(objectives.pruned_early, 6, made)
        assert_alike(plain, ours)


def test_several_objectives_and_a_metric_that_gives_promise(scheduler_in_process: Any) -> None:
    def made() -> optuna.Study:
        return optuna.create_study(
            directions=["minimize", "maximize"], sampler=optuna.samplers.NSGAIISampler(seed=1, population_size=3)
        )

    plain = made()
    plain.optimize(objectives.two_values, n_trials=6)
    ours = made()
    optimize(ours, objectives.two_values, n_trials=6, promise_metric=("accuracy", "maximize"))
    assert_alike(plain, ours)
    assert [trial.params for trial in plain.best_trials] == [trial.params for trial in ours.best_trials]
    assert [trial.user_attrs["metrics"] for trial in plain.trials] == [t.user_attrs["metrics"] for t in ours.trials]
    study = scheduler_in_process.request("GET", "/overview")["studies"][-1]
    assert study["direction"] == "maximize"
    rows = scheduler_in_process.request("GET", "/rows", params={"study": study["name"]})["trials"]
    [first] = [each for each in rows if each["number"] == 0]
    assert first["step"] == 1
    assert first["latest"] == pytest.approx(ours.trials[0].user_attrs["metrics"]["accuracy"])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_an_objective_sets_arrives_as_optuna_keeps_it() -> None:
    plain, ours = both(objectives.sets_all_kinds, 3, lambda: optuna.create_study(sampler=SAMPLERS["Random"]()))
    for theirs, mine in zip(plain.trials, ours.trials, strict=True):
        assert mine.value == theirs.value
        for name, value in theirs.user_attrs.items():
            back = mine.user_attrs[name]
            assert type(back) is type(value)
            np.testing.assert_equal(back, value)
        [scores] = [value for key, value in theirs.system_attrs.items() if "cv_scores" in key]
        np.testing.assert_array_equal(mine.system_attrs["terminator:cv_scores"], scores)


def test_what_cannot_travel_is_refused_in_the_objectives_own_line() -> None:
    made = optuna.create_study()
    optimize(made, objectives.sets_a_model, n_trials=1)
    assert "a builtins.object cannot be sent from a replica to its study" in made.trials[0].user_attrs["refused"]


def test_a_report_is_refused_with_several_objectives_as_by_optuna() -> None:
    made = optuna.create_study(directions=["minimize", "minimize"])
    with pytest.raises(NotImplementedError, match="multi-objective"):
        optimize(made, objectives.returns_nan, n_trials=1)


@pytest.mark.skipif(not hasattr(optuna.Trial, "set_constraint"), reason="this Optuna has no constraints of trials")
def test_constraints() -> None:
    plain, ours = both(objectives.constrained, 8, lambda: optuna.create_study(sampler=SAMPLERS["TPE"]()))
    assert_alike(plain, ours)
    assert [t.constraints for t in ours.trials] == [t.constraints for t in plain.trials]
    assert ours.best_trial.number == plain.best_trial.number


def test_artifacts_are_uploaded_by_optunas_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "artifacts"
    folder.mkdir()
    made = optuna.create_study()
    made.set_user_attr("folder", str(folder))
    optimize(made, objectives.uploads, n_trials=1)
    store = optuna.artifacts.FileSystemArtifactStore(str(folder))
    [artifact] = optuna.artifacts.get_all_artifact_meta(made.trials[0], storage=made._storage)
    assert artifact.filename == "notes.txt"
    with store.open_reader(artifact.artifact_id) as content:
        assert content.read() == b"from a replica"


def test_the_study_can_be_asked_and_stopped_from_within_the_objective() -> None:
    plain, ours = both(objectives.stops_the_study, 9, optuna.create_study)
    assert_alike(plain, ours)
    assert len(ours.trials) == 3
    assert ours.user_attrs["seen"] == plain.user_attrs["seen"]


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (objectives.looks_at_trials, r"study\.trials is not available.*a callback of optimize\(\) can use it"),
        (objectives.looks_at_storage, "no access to the study's storage"),
        (objectives.looks_at_relative_params, "relative_params is not available"),
    ],
)
def test_what_lives_in_the_driver_is_refused_in_words(objective: Any, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        optimize(optuna.create_study(), objective, n_trials=1)


@pytest.mark.filterwarnings("ignore:`optuna.terminator` module has been deprecated")
def test_the_terminator_ends_the_sweep() -> None:
    def run(how: Callable[..., Any]) -> optuna.Study:
        made = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
        terminator = optuna.terminator.Terminator(
            improvement_evaluator=optuna.terminator.BestValueStagnationEvaluator(max_stagnation_trials=3),
            error_evaluator=optuna.terminator.StaticErrorEvaluator(0.0),
            min_n_trials=4,
        )
        callback = optuna.terminator.TerminatorCallback(terminator)
        how(made, objectives.smooth, n_trials=40, callbacks=[callback])
        return made

    plain, ours = run(optuna.Study.optimize), run(optimize)
    assert_alike(plain, ours)
    assert len(ours.trials) < 40


def test_a_cross_validations_scores_are_kept() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, ours = both(objectives.cross_validates, 2, lambda: optuna.create_study(sampler=SAMPLERS["Random"]()))
    assert_alike(plain, ours)
    key = "terminator:cv_scores"
    assert [t.system_attrs[key] for t in ours.trials] == [t.system_attrs[key] for t in plain.trials]


def test_no_trial_starts_after_the_timeout() -> None:
    made = optuna.create_study()
    optimize(made, objectives.naps, timeout=1.0)
    starts = [trial.datetime_start for trial in made.trials if trial.datetime_start]
    # The time runs from before the first trial's start.
    assert (max(starts) - min(starts)).total_seconds() <= 1.0
    assert {trial.state for trial in made.trials} == {optuna.trial.TrialState.COMPLETE}


class TestElastic:
    """A plain objective for an untouched ``study.optimize``."""

    def test_nothing_differs(self) -> None:
        plain, ours = (optuna.create_study(sampler=SAMPLERS["TPE"]()) for _ in range(2))
        plain.optimize(objectives.quadratic, n_trials=6)
        with elastic(objectives.quadratic) as objective:
            ours.optimize(objective, n_trials=6)
        assert_alike(plain, ours)

    def test_several_jobs_callbacks_and_caught_exceptions(self) -> None:
        made = optuna.create_study()
        seen: list[int] = []
        with elastic(objectives.sometimes_raises) as objective:
            made.optimize(
                objective,
                n_trials=6,
                n_jobs=3,
                catch=(ValueError,),
                callbacks=[lambda study, trial: seen.append(trial.number)],
            )
        assert sorted(seen) == list(range(6))
        assert sorted(trial.state.name for trial in made.trials) == ["COMPLETE"] * 3 + ["FAIL"] * 3

    def test_it_serves_one_study_and_can_be_used_again(self) -> None:
        with elastic(objectives.quadratic) as objective:
            first = optuna.create_study()
            first.optimize(objective, n_trials=1)
            first.optimize(objective, n_trials=1)
            with pytest.raises(Exception, match="make one for each study"):
                optuna.create_study().optimize(objective, n_trials=1)
        first.optimize(objective, n_trials=1)
        objective.close()
        assert len(first.trials) == 3


@pytest.mark.parametrize("front_end", ["optimize", pytest.param("elastic", marks=pytest.mark.slow)])
def test_nothing_differs_in_processes(front_end: str, scheduler: Any, tmp_path: Path) -> None:
    names = iter(["plain", "ours"])

    def made() -> optuna.Study:
        return optuna.create_study(
            study_name=next(names),
            storage=f"sqlite:///{tmp_path / 'study.db'}",
            sampler=SAMPLERS["TPE"](),
            pruner=PRUNERS["Median"](),
        )

    plain, ours = made(), made()
    plain.optimize(objectives.pruned_early, n_trials=8)
    before = len(scheduler.request("GET", "/trials"))
    if front_end == "optimize":
        optimize(ours, objectives.pruned_early, n_trials=8)
    else:
        with elastic(objectives.pruned_early) as objective:
            ours.optimize(objective, n_trials=8)
    assert_alike(plain, ours)
    assert len(scheduler.request("GET", "/trials")) == before + 8
