"""The pages and the code agree, and the tutorial's commands do what it says."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dist_core
import tuner_bridge
from scripts.check_docs import ROOT, Page, check, pages
from tests.support.ports import ReservedPort, until_it_answers

TUTORIAL = ROOT / "docs" / "tutorial.md"
STEP = re.compile(
    r"<!-- (file: (?P<name>\S+)|run|run in the background) -->\n```\w+\n(?P<content>.*?)^```", re.MULTILINE | re.DOTALL
)


def test_nothing_on_the_pages_is_stale() -> None:
    found = pages()
    assert len(found) > 10
    assert [str(each) for page in found for each in check(page)] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[a page](nowhere.md)", "leads nowhere"),
        ("[a heading](goodput.md#not-there)", "has no heading #not-there"),
        ("`tests/nowhere/test_x.py`", "there is no tests/nowhere/test_x.py"),
        ("`test_wire.py::test_that_is_gone`", "there is no test test_that_is_gone"),
        ("```python\nfrom tuner_bridge import optimise\n```", "tuner_bridge has no optimise"),
        ("```python\nfrom tuner_bridge import optimize\noptimize(study, f, slot=2)\n```", "takes no slot="),
        ("```python\nfor x in:\n```", "this is not Python"),
        ("```yaml\na: [1\n```", "this is not YAML"),
        ("```sh\nelastune lst\n```", "`elastune` has no command lst"),
        ("```\nelastune ls --stat-dir x\n```", "`elastune ls` has no option --stat-dir"),
        ("```\nmake tests\n```", "make has no target tests"),
        ("the image elastune:9.9.9", "the version is"),
    ],
)
def test_what_is_stale_is_found(text: str, why: str) -> None:
    (found,) = check(Page(ROOT / "docs" / "page.md", f"# Page\n\n{text}\n"))
    assert why in str(found)


@pytest.mark.parametrize("package", [dist_core, tuner_bridge], ids=lambda package: package.__name__)
def test_public_docstrings_tell_of_each_parameter(package: ModuleType) -> None:
    looked_at = 0
    for name in package.__all__:
        public = getattr(package, name)
        # The fields of a dataclass have docstrings of their own, in its source.
        if not callable(public) or dataclasses.is_dataclass(public):
            continue
        arguments = (public.__doc__ or "").partition("Args:")[2]
        for parameter in inspect.signature(public).parameters:
            if parameter.startswith("_"):
                continue
            assert re.search(rf"^ +\*{{0,2}}{parameter}: [A-Za-z`*]", arguments, re.MULTILINE), f"{name}: {parameter}"
            looked_at += 1
    assert looked_at > 20


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    """A dozen commands, each a process that imports what it needs; four of them train."""
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    environ.pop("ELASTUNE_URL", None)
    background: list[subprocess.Popen[bytes]] = []
    done = []
    port = ReservedPort()
    exports = ""
    try:
        text = TUTORIAL.read_text().replace("7311", str(port.number))
        for step in STEP.finditer(text):
            kind, content = step[1], step["content"]
            if step["name"]:
                (tmp_path / step["name"]).write_text(content)
            elif kind == "run in the background":
                background.append(subprocess.Popen(["bash", "-c", f"exec {content}"], cwd=tmp_path, env=environ))
                until_it_answers(f"http://127.0.0.1:{port.number}")
            else:
                run = subprocess.run(
                    ["bash", "-euc", exports + content],
                    cwd=tmp_path,
                    env=environ,
                    capture_output=True,
                    text=True,
                    timeout=200,
                    check=False,
                )
                assert run.returncode == 0, f"{content}\n{run.stdout}\n{run.stderr}"
                done.append(content)
            exports += "".join(line + "\n" for line in content.splitlines() if line.startswith("export "))
    finally:
        for process in background:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
        port.release()
    assert len(done) >= 6
    assert (tmp_path / "slots.png").exists()
