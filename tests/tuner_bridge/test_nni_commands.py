"""How the command of an NNI experiment is read, registered and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from scheduler.errors import SchedulerError
from tests.support.nni_bench import Bench
from tuner_bridge.errors import BridgeError
from tuner_bridge.in_replica.scripts import Script
from tuner_bridge.nni import registration as command
from tuner_bridge.nni.experiment_driver import as_script

PYTHON_FOLDER = str(Path(sys.executable).parent)


def _call(wanted: click.Command) -> None:
    """The command without a command line."""
    assert wanted.callback is not None
    wanted.callback()


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


def test_code_is_a_script_as_well() -> None:
    found = as_script("python -c 'import sys; print(sys.argv)' --lr 0.1", "/code", PYTHON_FOLDER)
    code = "import sys; print(sys.argv)"
    assert found == Script(path=None, module=None, arguments=("--lr", "0.1"), code=code)


@pytest.mark.parametrize(
    "given",
    [
        "bash run.sh",
        "python train.py > out",
        "cd x && python train.py",
        "python train.py $HOME",
        "LR=1 python train.py",
        "python -c",
        "python -O train.py",
        "python",
        "python -m",
        "/no/such/python train.py",
        "pypy train.py",
        "python train.py *.csv",
    ],
)
def test_other_commands_need_a_shell(given: str) -> None:
    assert as_script(given, "/code", PYTHON_FOLDER) is None


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
    _call(command.register)
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]
    services = json.loads(path.read_text())
    assert set(services) == {"another", "tuner_bridge"}
    assert Path(services["tuner_bridge"]["nodeModulePath"]).exists()
    _call(command.unregister)
    _call(command.unregister)
    assert set(json.loads(path.read_text())) == {"another"}
    path.write_text("[broken")
    with pytest.raises(SchedulerError, match="not what NNI writes there"):
        _call(command.register)
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
    assert made(slots=2, slots_per_replica=[1, 2, 4]).slots_per_replica == [1, 2, 4]
    for options, words in (
        ({"min_replicas": 0}, "min_replicas is 0"),
        ({"min_replicas": 2, "max_replicas": 1}, "must not exceed max_replicas"),
        ({"slots": 0}, "slots is 0; it must be above 0"),
        ({"slots": 1, "min_replicas": 2}, "there are 1 slots"),
        ({"slots": 3, "slots_per_replica": [4, 8]}, "minReplicas is 1 of 4 slots each but there are 3 slots"),
        ({"slots_per_replica": [1, 0]}, "or a list of at most"),
        ({"memory_per_slot": float("nan")}, "memoryPerSlot is nan"),
        ({"weight": 0}, "weight is 0"),
        ({"priority": 5000}, "priority is 5000"),
        ({"goal": "speed"}, "goal is 'speed'"),
        ({"reuse_mode": False}, "reuseMode is false"),
        ({"scheduler_url": "127.0.0.1:7300"}, "must start with http"),
        ({"trackers": [{"name": "Comet"}]}, "a tracker's name is 'Comet'; choose one of MLflow"),
        ({"scheduler_url": "http://h:1", "slots_per_gpu": 2}, "leave one of them out"),
        ({"trial_gpu_number": 4}, "a slot is one GPU"),
    ):
        with pytest.raises(ValueError, match=words):
            made(**options)
    config = ElastuneConfig(trial_command="python t.py", trial_code_directory=str(tmp_path))
    config.debug = False
    hybrid = SimpleNamespace(trial_gpu_number=None, nni_manager_ip=None, training_service=[config])
    with pytest.raises(ValueError, match="tuner_bridge cannot be combined"):
        config._canonicalize([hybrid])


def test_front_ends_do_not_import_each_other() -> None:
    code = (
        "import sys, tuner_bridge, tuner_bridge.driving.study_driver\n"
        "print([name for name in ('nni', 'optuna', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
