"""Wheel and sdist: into an environment that has nothing else, and the demo runs in it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dist_core
from tests.support.project import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NOT_SOURCES = (
    "node_modules",
    ".venv*",
    ".git",
    "build",
    "dist",
    "_build",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    "elastune-demo",
)
NAME = f"elastune-{dist_core.__version__}"


def run(command: Sequence[str | Path], folder: Path, **environ: str) -> str:
    """What the command prints, run as if this checkout were not there."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ELASTUNE_URL")}
    done = subprocess.run(
        command, cwd=folder, env={**clean, **environ}, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@dataclass(frozen=True, slots=True)
class Built:
    wheel: Path
    sdist: Path
    unpacked: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    sources = folder / "sources"
    shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(*NOT_SOURCES), symlinks=True)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)], sources)
    sdist = folder / f"{NAME}.tar.gz"
    with tarfile.open(sdist) as archive:
        checks: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **checks)
    return Built(folder / f"{NAME}-py3-none-any.whl", sdist, folder / NAME)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment without packages."""
    folder = tmp_path_factory.mktemp("empty") / "environment"
    run([sys.executable, "-m", "venv", str(folder)], folder.parent)
    return folder / "bin" / "python"


def test_they_hold_what_the_packages_need(built: Built) -> None:
    tracked = [
        path.relative_to(ROOT)
        for name in ("dist_core", "trials", "scheduler", "tuner_bridge")
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".js") and "node_modules" not in path.parts
    ]
    with zipfile.ZipFile(built.wheel) as wheel:
        inside = set(wheel.namelist())
    assert {str(path) for path in tracked} <= inside
    assert f"{NAME}.dist-info/licenses/LICENSE" in inside
    assert "scheduler/dashboard/page/built/index.html" in inside
    assert any(name.startswith("scheduler/dashboard/page/built/assets/") and name.endswith(".js") for name in inside)
    assert not any("node_modules" in name or name.endswith(".tsx") for name in inside)
    for name in ("LICENSE", "CONTRIBUTING.md", "examples/digits.py", "docs/conf.py", "tests/conftest.py", "Makefile"):
        assert (built.unpacked / name).exists(), name


def test_neither_is_built_without_the_page(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(*NOT_SOURCES, "built"), symlinks=True)
    for kind in ("--wheel", "--sdist"):
        done = subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", str(tmp_path)],
            cwd=sources,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode != 0
        assert "run `make page` first" in done.stdout + done.stderr


def test_wheels_for_a_machine_without_a_network_are_few_and_install_from_their_folder(tmp_path: Path) -> None:
    """Packages that the machine has, torch and numpy, are not packed, and those that are packed fit them."""
    numpy, torch = (importlib.metadata.version(name) for name in ("numpy", "torch"))
    (tmp_path / "there.txt").write_text(f"numpy=={numpy}\ntorch=={torch}\n-e git+file:///home/me/mine#egg=mine\n")
    pack: list[str | Path] = [sys.executable, "-m", "scripts.wheelhouse", tmp_path / "wheels"]
    assert "MiB; there: bash wheels/install.sh python" in run([*pack, "--there", tmp_path / "there.txt"], ROOT)
    wheels = list((tmp_path / "wheels").glob("*.whl"))
    assert sum(each.stat().st_size for each in wheels) < 60 * 2**20
    assert not {"numpy", "torch"} & {each.name.partition("-")[0] for each in wheels}
    run([sys.executable, "-m", "venv", tmp_path / "machine"], tmp_path)
    python = tmp_path / "machine" / "bin" / "python"
    run([python, "-m", "pip", "install", "-q", f"numpy=={numpy}"], tmp_path)
    run(["bash", tmp_path / "wheels" / "install.sh", python], tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    command = python.with_name("elastune")
    assert run([command, "--version"], tmp_path) == f"elastune {dist_core.__version__}\n"
    assert "fifo" in run([command, "simulate", "--jobs", "3", "--policy", "fifo", "--nodes", "1"], tmp_path)


def test_the_demo_runs_where_nothing_else_is_installed(built: Built, empty: Path, tmp_path: Path) -> None:
    # What they need comes as for a newcomer who has unpacked the sdist; then the wheel takes the sources' place.
    """Installs an environment, and runs the demo in it."""
    run(["bash", "scripts/setup.sh", "demo"], built.unpacked, VENV=str(empty.parent.parent), PYTHON=sys.executable)
    install: list[str | Path] = [empty, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps"]
    run([*install, built.wheel], tmp_path)
    command = empty.with_name("elastune")
    assert run([command, "--version"], tmp_path) == f"elastune {dist_core.__version__}\n"
    demo: list[str | Path] = [
        empty,
        built.unpacked / "examples" / "digits.py",
        "--trials",
        "3",
        "--jobs",
        "2",
        "--slots",
        "2",
    ]
    shown = run(demo, tmp_path, DIGITS_EPOCHS="3", OMP_NUM_THREADS="1")
    assert "best: trial" in shown
    assert (tmp_path / "elastune-demo" / "slots.png").exists()
    # The sdist, built by pip as a user's would be, in place of the wheel.
    run([*install, built.sdist], tmp_path)
    where = run([empty, "-c", "import tuner_bridge; print(tuner_bridge.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(empty.parent.parent)
    assert "fifo" in run([command, "simulate", "--jobs", "3", "--policy", "fifo", "--nodes", "1"], tmp_path)
