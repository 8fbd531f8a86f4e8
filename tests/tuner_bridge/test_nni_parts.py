"""The parts of NNI's front end without an experiment: configuration, commands, results, the driver's bookkeeping."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from scheduler.errors import SchedulerError
from trials.spec import TrialSpec
from tuner_bridge.errors import BridgeError, SweepInterrupted
from tuner_bridge.in_replica.scripts import Script
from tuner_bridge.nni import registration as command
from tuner_bridge.nni.experiment_driver import ExperimentDriver
from tuner_bridge.nni.trial_command import as_script

PYTHON_FOLDER = str(Path(sys.executable).parent)


@pytest.mark.parametrize(
    ("given", "path", "module", "arguments"),
    [
        ("python train.py", "/code/train.py", None, ()),
        ("python3 train.py --lr 0.1 'a b'", "/code/train.py", None, ("--lr", "0.1", "a b")),
        ("python3.11 -u train.py", "/code/train.py", None, ()),
        ("python train.py --note 'a > b'", "/code/train.py", None, ("--note", "a > b")),
        ("python /elsewhere/train.py", "/elsewhere/train.py", None, ()),
        ("python -m package.train --x", None, "package.train", ("--x",)),
        ("python train.py --lr=0.1 --share=50%", "/code/train.py", None, ("--lr=0.1", "--share=50%")),
        (f"{sys.executable} train.py", "/code/train.py", None, ()),
    ],
)
def test_commands_that_start_a_script_of_this_python(
    given: str, path: str | None, module: str | None, arguments: tuple[str, ...]
) -> None:
    if given.startswith("python3.11") and sys.version_info[:2] != (3, 11):
        pytest.skip("names another Python")
    assert as_script(given, "/code", PYTHON_FOLDER) == Script(path=path, module=module, arguments=arguments)


@pytest.mark.parametrize(
    "given",
    [
        "bash run.sh",
        "python train.py > out",
        "cd x && python train.py",
        "python train.py $HOME",
        "LR=1 python train.py",
        "python -c 'print(1)'",
        "python",
        "python -m",
        "/no/such/python train.py",
        "pypy train.py",
        "python train.py *.csv",
    ],
)
def test_other_commands_need_a_shell(given: str) -> None:
    assert as_script(given, "/code", PYTHON_FOLDER) is None


class Channel:
    """A scheduler that knows the trials of an earlier manager."""

    def request(self, method: str, path: str) -> Any:
        if path == "/trials":
            return [
                {"study": "nni-e", "trial_id": "t1", "number": 0},
                {"study": "other", "trial_id": "t2", "number": 7},
            ]
        assert path == "/trials/t1"
        return {"spec": {"payload": {"nni": {"trial": "AAAAA"}}}}


class Driver:
    """A driver whose trials end when the test says so."""

    slots = 4
    study_key = "nni-e"
    interrupted = False

    def __init__(self) -> None:
        self.client = Channel()
        self.specs: list[TrialSpec] = []
        self.cancelled: list[tuple[str, str]] = []
        self.asks: list[Callable[[str, dict[str, Any]], Any]] = []
        self.watches: list[Callable[[Mapping[str, Any]], None]] = []
        self.submits = threading.Event()
        self.may_submit = threading.Event()
        self.may_submit.set()
        self.ended: Mapping[str, Any] | BaseException = SweepInterrupted()
        self.may_end = threading.Event()

    def run_trial(self, spec: TrialSpec, ask: Any, watch: Any, submitted: Callable[[str], None]) -> Mapping[str, Any]:
        self.specs.append(spec)
        self.asks.append(ask)
        self.watches.append(watch)
        self.submits.set()
        self.may_submit.wait(5.0)
        submitted(f"id-{spec.number}")
        assert self.may_end.wait(5.0)
        if isinstance(self.ended, BaseException):
            raise self.ended
        return self.ended

    def cancel_for_sure(self, trial_id: str, why: str) -> None:
        self.cancelled.append((trial_id, why))

    def interrupt(self) -> None:
        self.interrupted = True
        self.may_end.set()


class Bench:
    def __init__(self, folder: Path, **experiment: Any) -> None:
        self.said: list[Mapping[str, Any]] = []
        self.driver = Driver()
        self.experiment = {
            "experiment": "e",
            "command": f"{sys.executable} train.py",
            "code_dir": str(folder),
            "trials_dir": str(folder / "trials"),
            "min_replicas": 1,
            **experiment,
        }
        self.served = ExperimentDriver(self.experiment, self.driver, self.said.append)  # type: ignore[arg-type]  # a stand-in

    def submit(self, name: str, sequence: int = 0) -> None:
        self.driver.submits.clear()
        self.served.handle({"submit": {"trial": name, "sequence": sequence, "parameter": "{}"}})
        assert self.driver.submits.wait(5.0)

    def until_said(self) -> None:
        self.until(lambda: bool(self.said))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5.0
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def end(self, ended: Mapping[str, Any] | BaseException) -> None:
        self.driver.ended = ended
        self.driver.may_end.set()
        for thread in self.served._threads:
            thread.join(5.0)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "train.py").write_text("import nni, torch\nimport helper\n")
    return Bench(tmp_path, max_replicas=8)


def test_a_trial_runs_the_command_as_a_script_in_the_code_folder(bench: Bench, tmp_path: Path) -> None:
    bench.submit("AAAAA", 3)
    [spec] = bench.driver.specs
    assert (spec.study, spec.number, spec.min_replicas, spec.max_replicas) == ("nni-e", 3, 1, 4)
    assert (spec.working_dir, spec.python_path[0]) == (str(tmp_path), str(tmp_path))
    assert spec.user_code == ()
    assert "torch" in spec.preload
    assert not {"nni", "helper"} & set(spec.preload)
    assert spec.payload["nni"]["folder"] == str(tmp_path / "trials" / "AAAAA")
    bench.served.handle({"submit": {"trial": "AAAAA", "sequence": 3, "parameter": "{}"}})
    assert len(bench.driver.specs) == 1
    bench.served.close()


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
    with pytest.raises(ValueError, match="no question"):
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
    with pytest.raises(BridgeError, match="cannot be read: No closing quotation"):
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
        (RuntimeError("lost its study"), "FAILED", "lost its study"),
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


def test_several_replicas_of_a_shell_command_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"minReplicas is 2, but the trial command 'bash run\.sh'"):
        Bench(tmp_path, command="bash run.sh", min_replicas=2)
    alone = Bench(tmp_path, command="bash run.sh", max_replicas=4)
    assert (alone.served.template.max_replicas, alone.served.template.entrypoint) == (
        1,
        "tuner_bridge.nni.replica:run_command",
    )


def test_registering_changes_nothing_else_and_keeps_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nni")
    path = tmp_path / "training_services.json"
    path.write_text(json.dumps({"another": {"nodeModulePath": "x", "nodeClassName": "y"}}))
    monkeypatch.setattr(command, "_file", lambda: path)
    path.chmod(0o644)
    command.register()
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]
    services = json.loads(path.read_text())
    assert set(services) == {"another", "tuner_bridge"}
    assert Path(services["tuner_bridge"]["nodeModulePath"]).exists()
    command.unregister()
    command.unregister()
    assert set(json.loads(path.read_text())) == {"another"}
    path.write_text("[broken")
    with pytest.raises(SchedulerError, match="not what NNI writes there"):
        command.register()
    assert path.read_text() == "[broken"


def test_the_configuration_is_checked_in_words(tmp_path: Path) -> None:
    pytest.importorskip("nni")
    from tuner_bridge.nni.training_service import ElastuneConfig

    def made(**options: Any) -> ElastuneConfig:
        config = ElastuneConfig(trial_command="python t.py", trial_code_directory=str(tmp_path), **options)
        config.debug = False
        parent = SimpleNamespace(trial_gpu_number=None, nni_manager_ip=None, training_service=config)
        config._canonicalize([parent])
        config._validate_canonical()
        return config

    assert made().trial_gpu_number is None
    assert made(trial_gpu_number=1).nni_manager_ip == "127.0.0.1"
    for options, words in (
        ({"min_replicas": 0}, "min_replicas is 0"),
        ({"min_replicas": 2, "max_replicas": 1}, "must not exceed max_replicas"),
        ({"slots": 0}, "slots is 0; it must be above 0"),
        ({"slots": 1, "min_replicas": 2}, "there are 1 slots"),
        ({"memory_per_slot": float("nan")}, "memory_per_slot is nan"),
        ({"weight": 0}, "weight is 0"),
        ({"priority": 5000}, "priority is 5000"),
        ({"goal": "speed"}, "goal is 'speed'"),
        ({"reuse_mode": False}, "reuseMode is false"),
        ({"scheduler_url": "127.0.0.1:7300"}, "must read like http"),
        ({"scheduler_url": "http://h:1", "slots_per_gpu": 2}, "leave one of them out"),
        ({"trial_gpu_number": 4}, "a replica has one slot"),
    ):
        with pytest.raises(ValueError, match=words):
            made(**options)
    config = ElastuneConfig(trial_command="python t.py", trial_code_directory=str(tmp_path))
    config.debug = False
    hybrid = SimpleNamespace(trial_gpu_number=None, nni_manager_ip=None, training_service=[config])
    with pytest.raises(ValueError, match="tuner_bridge works alone"):
        config._canonicalize([hybrid])


def test_front_ends_do_not_import_each_other() -> None:
    code = (
        "import sys, tuner_bridge, tuner_bridge.driving.study_driver\n"
        "print([name for name in ('nni', 'optuna', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
