"""A trainer's evaluations are an NNI trial's results, where its code reports none itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dist_core.trial.current import get_core
from tests.support.nni_experiment import NniExperiment

nni = pytest.importorskip("nni")

from tuner_bridge.nni.replica import STATE, Evaluations  # noqa: E402  # what it reports to needs nni

LOSS = {"eval_loss": 0.5, "eval_accuracy": 0.9, "eval_runtime": 1.0}


class Channel:
    """NNI, as far as its results go."""

    def __init__(self) -> None:
        self.results: list[float] = []
        self.finals = 0
        self.final: float | None = None

    @property
    def counted(self) -> int:
        return len(self.results)

    def report_final(self, value: float) -> None:
        self.finals += 1
        self.final = value


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    made = Channel()
    monkeypatch.setattr("tuner_bridge.nni.channel.present_channel", lambda: made)
    monkeypatch.setattr(nni, "report_intermediate_result", made.results.append)
    monkeypatch.setattr(nni, "report_final_result", made.report_final)
    monkeypatch.setattr(nni, "get_current_parameter", lambda: {"x": 1})
    yield made
    get_core().registry.forget(STATE)


def losses(told: Evaluations, *values: float) -> None:
    for step, value in enumerate(values):
        told({**LOSS, "eval_loss": value}, step, None)


def test_evaluations_are_results_and_the_last_one_is_final(channel: Channel) -> None:
    told = Evaluations(minimises=True)
    losses(told, 0.5, 0.4, 0.3)
    told.end()
    assert channel.results == [0.5, 0.4, 0.3]
    assert channel.final == 0.3


def test_a_single_evaluation_is_told_at_the_end(channel: Channel) -> None:
    told = Evaluations(minimises=False)
    told(LOSS, 0, None)
    assert channel.results == []
    told.end()
    assert channel.results == [0.9]
    assert channel.final == 0.9


@pytest.mark.parametrize("theirs_first", [True, False])
def test_code_that_reports_itself_is_left_alone(channel: Channel, theirs_first: bool) -> None:
    told = Evaluations(minimises=True)
    for step in range(3):
        if theirs_first:
            channel.results.append(7.0)
        told(LOSS, step, None)
        if not theirs_first:
            channel.results.append(7.0)
    told.end()
    assert channel.results == [7.0] * 3
    assert channel.final is None


def test_a_final_result_of_the_codes_own_stays_the_only_one(channel: Channel) -> None:
    told = Evaluations(minimises=True)
    losses(told, 0.5, 0.4)
    channel.report_final(0.1)
    told.end()
    assert (channel.finals, channel.final) == (1, 0.1)


def test_another_replica_goes_on_where_the_state_was_taken(channel: Channel) -> None:
    before = Evaluations(minimises=True)
    losses(before, 0.5, 0.4)
    taken = before.state_dict()
    get_core().registry.forget(STATE)
    get_core().registry.restore({STATE: taken})
    after = Evaluations(minimises=True)
    losses(after, 0.3)
    after.end()
    assert channel.results == [0.5, 0.4, 0.3]
    assert channel.final == 0.3


def test_what_is_unknown_is_not_reported(channel: Channel, caplog: pytest.LogCaptureFixture) -> None:
    told = Evaluations(minimises=False)
    for step in range(2):
        told({"eval_f1": 1.0, "eval_accuracy": 0.5}, step, None)
    told.end()
    assert channel.results == []
    assert channel.final is None
    assert caplog.text.count("metric_for_best_model") == 1


def test_a_script_that_asks_for_no_parameters_reports_nothing(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nni, "get_current_parameter", lambda: None)
    told = Evaluations(minimises=True)
    losses(told, 0.5, 0.4)
    told.end()
    assert channel.results == []


TRAINER = """
import os, time
import nni
from dist_core.huggingface import ElasticTrainer
from tests.support.hugging_face import Tokens, accuracy, arguments, classifier
from transformers import TrainerCallback


class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        time.sleep(0.05)
        with open(f"{os.environ['NOTES']}/{os.getpid()}", "a") as notes:
            notes.write(f"{state.global_step} ")


rate = 0.001 + 0.01 * nni.get_next_parameter()["x"]
trainer = ElasticTrainer(
    args=arguments("out", num_train_epochs=5, eval_strategy="epoch", save_strategy="no", learning_rate=rate),
    model_init=classifier,
    train_dataset=Tokens(96),
    eval_dataset=Tokens(41, seed=1),
    compute_metrics=accuracy,
    callbacks=[Slow()],
)
trainer.train()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_experiment_hears_a_trainer_that_loses_a_replica(experiment: Callable[..., NniExperiment]) -> None:
    """NNI's manager takes 10 s to start, and the trainer goes on behind a loss."""
    pytest.importorskip("transformers")
    made = experiment(
        TRAINER,
        {"minReplicas": 2, "maxReplicas": 2},
        maxTrialNumber=1,
        trialConcurrency=1,
        tuner={"name": "Random", "classArgs": {"seed": 1, "optimize_mode": "minimize"}},
    )
    made.create()

    def results() -> list[tuple[str, int, Any]]:
        trials = made.trials()
        return made.results(trials[0]["trialJobId"]) if trials else []

    made.until(lambda: len(results()) >= 2, "two evaluations", 120.0)
    os.kill(int(next(made.notes.iterdir()).name), signal.SIGKILL)
    made.until_done(200.0)
    assert made.states() == ["SUCCEEDED"]
    found = results()
    assert [(kind, number) for kind, number, _ in found] == [
        *(("PERIODICAL", number) for number in range(5)),
        ("FINAL", 0),
    ]
    told = [value for kind, _, value in found if kind == "PERIODICAL"]
    assert found[-1][2] == told[-1]
    assert told[-1] < told[0], "losses, by the experiment's direction"
