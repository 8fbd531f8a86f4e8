"""The parts of NNI's front end without an experiment: configuration, commands, results, the driver's bookkeeping."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import tuner_bridge.nni
from tests.support.nni_bench import Bench
from tuner_bridge.errors import BridgeError, InvalidSweep, SweepInterrupted
from tuner_bridge.nni.experiment_driver import KEPT, TrackedResults
from tuner_bridge.trackers import MLflow, TensorBoard, trackers_named


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "train.py").write_text("import nni, torch\nimport helper\n")
    return Bench(tmp_path, max_replicas=8)


def test_a_trial_runs_the_command_as_a_script_in_the_code_folder(bench: Bench, tmp_path: Path) -> None:
    bench.submit("AAAAA", 3)
    [spec] = bench.driver.specs
    assert (spec.study, spec.number, spec.min_replicas, spec.max_replicas) == ("nni-e", 3, 1, 4)
    assert (spec.working_dir, spec.python_path[0]) == (str(tmp_path), str(tmp_path))
    assert spec.code == ()
    assert "torch" in spec.preload
    assert not {"nni", "helper"} & set(spec.preload)
    assert spec.payload["nni"]["folder"] == str(tmp_path / "trials" / "AAAAA")
    bench.served.handle({"submit": {"trial": "AAAAA", "sequence": 3, "parameter": "{}"}})
    assert len(bench.driver.specs) == 1
    bench.served.close()


SUBMITTING = """
process.argv[1] = NNI + '/main.js';
require(NNI + '/common/globals');
require(NNI + '/common/globals/unittest').resetGlobals();
const { IocShim } = require(NNI + '/common/ioc_shim');
const pause = ms => new Promise(resolve => setTimeout(resolve, ms));
const manager = { trialJobs: new Map() };
IocShim.bindInstance(require(NNI + '/common/manager').Manager, manager);
IocShim.bindInstance(require(NNI + '/common/datastore').DataStore, {
    async getMetricData(id) { await pause(id === 'first' ? 50 : 0); return []; },
});
const { ElastuneTrainingService } = require(SERVICE);
const service = new ElastuneTrainingService({}, { logDir: '.' });
service.ready = true;
service.tell = message => console.log(message.submit.trial);
(async () => {
    for (const [sequenceId, id] of ['first', 'second', 'third'].entries()) {
        await service.submitTrialJob({ id, sequenceId, hyperParameters: { value: '{}' } });
        manager.trialJobs.set(id, {});
    }
    await service.introduced;
})();
"""


def test_trials_come_in_nnis_order_whichever_its_store_answers_first(tmp_path: Path) -> None:
    """A slot goes to the trial that came first."""
    folder = Path(sysconfig.get_path("purelib"), "nni_node")
    service = Path(tuner_bridge.nni.__path__[0], "elastune_training_service.js")
    script = tmp_path / "submitting.js"
    script.write_text(f"const NNI = {str(folder)!r}, SERVICE = {str(service)!r};{SUBMITTING}")
    command, environ = [folder / "node", script], {"NODE_PATH": str(folder)}
    process = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=30)
    assert process.stdout.split() == ["first", "second", "third"], process.stderr


def test_numbers_of_an_earlier_manager_stay_and_are_not_given_twice(bench: Bench) -> None:
    bench.served.know_earlier_trials()
    for name, sequence in (("BBBBB", 0), ("AAAAA", 5), ("CCCCC", 2)):
        bench.submit(name, sequence)
    assert {spec.payload["nni"]["trial"]: spec.number for spec in bench.driver.specs} == {
        "AAAAA": 0,
        "BBBBB": 1,
        "CCCCC": 2,
    }
    bench.served.close()


def test_a_result_is_answered_when_nni_has_it(bench: Bench) -> None:
    bench.submit("AAAAA")
    answered = threading.Event()

    def tell() -> None:
        assert bench.driver.asks[0]("metric", {"metric": '{"type": "FINAL"}', "order": 0}) is None
        answered.set()

    threading.Thread(target=tell).start()
    bench.until_said()
    [message] = bench.said
    assert message["metric"] == '{"type": "FINAL"}'
    assert message["order"] == 0
    assert not answered.wait(0.05)
    bench.served.handle({"taken": message["number"]})
    assert answered.wait(5.0)
    with pytest.raises(ValueError, match="may ask for 'metric'"):
        bench.driver.asks[0]("suggest_float", {})
    bench.served.close()


def test_several_results_are_answered_when_nni_has_the_last_and_come_in_order(bench: Bench) -> None:
    bench.submit("AAAAA")
    ask = bench.driver.asks[0]
    metrics = [
        {"metric": json.dumps({"type": "PERIODICAL", "sequence": number}), "order": number} for number in range(3)
    ]
    answered = threading.Event()

    def tell() -> None:
        ask("metrics", {"metrics": metrics})
        answered.set()

    threading.Thread(target=tell).start()
    bench.until(lambda: len(bench.said) == 3)
    assert [message["order"] for message in bench.said] == [0, 1, 2]
    for message in bench.said[:2]:
        bench.served.handle({"taken": message["number"]})
    assert not answered.wait(0.05)
    bench.served.handle({"taken": bench.said[2]["number"]})
    assert answered.wait(5.0)
    assert ask("taken", {}) == 3
    bench.served.close()


def test_a_result_that_nni_did_not_take_is_not_answered_when_the_experiment_stops(bench: Bench) -> None:
    bench.submit("AAAAA")
    raised: list[BaseException] = []

    def tell() -> None:
        try:
            bench.driver.asks[0]("metric", {"metric": "{}", "order": 0})
        except SweepInterrupted as error:
            raised.append(error)

    teller = threading.Thread(target=tell)
    teller.start()
    bench.until_said()
    bench.served.close()
    teller.join(5.0)
    assert raised


def test_a_trial_of_an_earlier_driver_can_be_cancelled(bench: Bench) -> None:
    bench.served.know_earlier_trials()
    bench.served.handle({"cancel": "AAAAA", "why": "cancelled in NNI"})
    bench.until(lambda: bool(bench.driver.cancelled))
    assert bench.driver.cancelled == [("t1", "cancelled in NNI")]


def test_a_replica_that_takes_over_hears_how_many_results_nni_has(bench: Bench) -> None:
    bench.driver.submits.clear()
    bench.served.handle({"submit": {"trial": "AAAAA", "sequence": 0, "parameter": "{}", "taken": 3}})
    assert bench.driver.submits.wait(5.0)
    ask = bench.driver.asks[0]
    assert ask("taken", {}) == 3
    metric = json.dumps({"type": "PERIODICAL", "sequence": 6})
    teller = threading.Thread(target=ask, args=("metric", {"metric": metric, "order": 6}))
    teller.start()
    bench.until_said()
    bench.served.handle({"taken": bench.said[0]["number"]})
    teller.join(5.0)
    assert ask("taken", {}) == 7
    bench.served.close()


def test_a_command_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="No closing quotation"):
        Bench(tmp_path, command="python train.py 'open")


def test_a_trial_cancelled_before_it_was_submitted_is_cancelled_then(bench: Bench) -> None:
    bench.driver.may_submit.clear()
    bench.submit("AAAAA")
    bench.served.handle({"cancel": "AAAAA", "why": "stopped early"})
    bench.served.handle({"cancel": "unknown", "why": "whatever"})
    bench.driver.may_submit.set()
    bench.until(lambda: bool(bench.driver.cancelled))
    bench.end({"state": "cancelled", "outcome": None, "reason": {"sentence": "stopped early"}})
    assert bench.driver.cancelled == [("id-0", "stopped early")]
    assert bench.said[-1] == {"trial": "AAAAA", "status": "SYS_CANCELED", "message": "stopped early"}


def test_trials_reach_the_scheduler_in_the_order_in_which_nni_made_them(bench: Bench) -> None:
    bench.driver.may_submit.clear()
    names = ["AAAAA", "BBBBB", "CCCCC"]
    bench.submit(names[0], 0)
    for sequence in (1, 2):
        bench.served.handle({"submit": {"trial": names[sequence], "sequence": sequence, "parameter": "{}"}})
    # However slow the first one's way is, no later one overtakes it.
    assert [thread.is_alive() for thread in bench.served._threads] == [True] * 3
    assert len(bench.driver.specs) == 1
    bench.driver.may_submit.set()
    bench.until(lambda: len(bench.driver.specs) == 3)
    assert [spec.number for spec in bench.driver.specs] == [0, 1, 2]
    bench.served.close()


def test_a_trial_that_cannot_be_submitted_does_not_hold_up_the_next(bench: Bench) -> None:
    bench.driver.run_trial = Mock(side_effect=RuntimeError("refused"))  # type: ignore[method-assign]  # fails at once
    for sequence, name in enumerate(("AAAAA", "BBBBB")):
        bench.served.handle({"submit": {"trial": name, "sequence": sequence, "parameter": "{}"}})
    bench.until(lambda: len(bench.said) == 2)
    assert [said["status"] for said in bench.said] == ["FAILED", "FAILED"]


@pytest.mark.parametrize(
    ("ended", "status", "words"),
    [
        ({"state": "succeeded", "outcome": {"kind": "value"}}, "SUCCEEDED", "as the scheduler says"),
        (
            {"state": "failed", "outcome": {"kind": "error", "error_type": "ValueError", "message": "no"}},
            "FAILED",
            "ValueError: no",
        ),
        ({"state": "failed", "outcome": None}, "FAILED", "as the scheduler says"),
        (RuntimeError("no longer drives its study"), "FAILED", "no longer drives its study"),
    ],
)
def test_how_a_trial_ended_in_nnis_words(bench: Bench, ended: Any, status: str, words: str) -> None:
    bench.submit("AAAAA")
    bench.driver.watches[0](
        {"state": "pending", "slots": 0, "reason": {"code": "no_slots", "sentence": "waits for a slot"}}
    )
    bench.driver.watches[0]({"state": "running", "slots": 2, "reason": {"code": "trains", "sentence": "trains"}})
    if isinstance(ended, dict):
        ended = {**ended, "reason": {"sentence": "as the scheduler says"}}
    bench.end(ended)
    assert bench.said == [
        {"trial": "AAAAA", "status": "WAITING", "message": "waits for a slot"},
        {"trial": "AAAAA", "status": "RUNNING", "message": "2 replicas"},
        {"trial": "AAAAA", "status": status, "message": words},
    ]


pytest.importorskip("nni")


# ------------------------------ trackers that an NNI experiment names; what they hear is tested with one that resumes


def test_trackers_are_made_of_their_names(tmp_path: Path) -> None:
    one, other = trackers_named(
        [{"name": "MLflow", "classArgs": {"experiment": "e"}}, {"name": "TensorBoard", "classArgs": {"folder": "runs"}}]
    )
    assert isinstance(one, MLflow)
    assert isinstance(other, TensorBoard)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "Tensorboard"}, "a tracker's name is 'Tensorboard'; choose one of MLflow, TensorBoard, Weights"),
        ({"name": "TensorBoard"}, "the tracker TensorBoard cannot be created with {}: missing 1 required .* 'folder'"),
        ({"name": "MLflow", "classArgs": {"uri": "x"}}, "unexpected keyword argument 'uri'"),
        ({"name": "MLflow", "folder": "x"}, "it must have a name, may have classArgs"),
        ({"classArgs": {}}, "it must have a name, may have classArgs"),
    ],
)
def test_what_is_no_tracker_is_said(entry: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSweep, match=said):
        trackers_named([entry])


def test_a_full_disk_costs_a_trial_its_notes_of_tracked_runs_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "trial"
    # Where the file is to be replaced stands a folder.
    (folder / KEPT).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "exists", lambda _: False)
        kept = TrackedResults([TensorBoard(tmp_path / "runs")], "title", "key", 3, folder)
    assert kept.identities
    assert "the tracked runs of trial 3 were not saved" in caplog.text
