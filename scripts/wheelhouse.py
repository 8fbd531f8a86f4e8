"""Wheels for a machine without a network that has torch and numpy already.

    there:  python -m pip freeze > there.txt
    here:   python -m scripts.wheelhouse wheels --there there.txt --python 3.12
    there:  bash wheels/install.sh python

What the other machine has stays as it is: packages that it has are not packed, and the others fit them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCES = (".*", "node_modules", "build", "dist", "tests", "benchmarks", "__pycache__", "elastune-demo")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PINNED = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)")
INSTALL = """#!/usr/bin/env bash
# Installs what is in this folder into the environment of the interpreter that is named (python), from no index.
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
"${1:-python}" -m pip install --quiet --no-index --no-deps "$folder"/*.whl
"${1:-python}" -m pip check
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def present(freeze: str) -> dict[str, str]:
    """Return versions by name from ``pip freeze``; without what names no version (editable installs, files)."""
    found = (PINNED.match(line) for line in freeze.splitlines())
    # A build's own part of the version (+cu128) is on no index.
    return {canonical(each["name"]): each["version"].partition("+")[0] for each in found if each is not None}


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"wheelhouse: pip {arguments[0]} failed:\n{done.stderr.strip()[-2000:]}")


def target_options(python: str, platforms: Sequence[str]) -> list[str]:
    named = [option for platform in platforms for option in ("--platform", platform)]
    return ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp", *named]


def missing(wheel: Path, extras: str, there: dict[str, str], target: list[str], folder: Path) -> list[str]:
    """Return the packages that are to be packed, as ``name==version``: the wheel's needs that are not there."""
    constraints, report = folder / "there.txt", folder / "report.json"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in there.items()))
    wanted = f"{wheel}[{extras}]" if extras else str(wheel)
    place = ("--target", str(folder / "nowhere"), "--ignore-installed", "--dry-run", "--quiet", "--report", str(report))
    pip("install", *place, *target, "--constraint", str(constraints), wanted)
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return [
        f"{each['name']}=={each['version']}"
        for each in found
        if canonical(each["name"]) not in there and canonical(each["name"]) != "elastune"
    ]


def pack(folder: Path, there: dict[str, str], python: str, platforms: Sequence[str], extras: str) -> int:
    """Fill the folder; returns the bytes in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    target = target_options(python, platforms)
    with tempfile.TemporaryDirectory() as work:
        # A build leaves files in its sources, which the next one would pack, too.
        sources = shutil.copytree(ROOT, Path(work) / "sources", ignore=shutil.ignore_patterns(*NOT_SOURCES))
        pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sources))
        [own] = folder.glob("elastune-*.whl")
        names = missing(own, extras, there, target, Path(work))
    if names:
        pip("download", "--quiet", "--no-deps", "--dest", str(folder), *target, *names)
    (folder / "install.sh").write_text(INSTALL)
    return sum(each.stat().st_size for each in folder.glob("*.whl"))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder to fill; wheels that are in it go")
    parser.add_argument("--there", type=Path, help="`pip freeze` of the environment to install into")
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="its Python")
    parser.add_argument("--platform", action="append", help="its platform's tag (x86-64 Linux with glibc 2.28)")
    parser.add_argument("--extras", default="", help="such as optuna,kubernetes")
    given = parser.parse_args(arguments)
    there = {} if given.there is None else present(given.there.read_text())
    size = pack(given.folder, there, given.python, given.platform or PLATFORMS, given.extras)
    count = len(list(given.folder.glob("*.whl")))
    print(f"{given.folder}: {count} wheels, {size / 2**20:.0f} MiB; there: bash {given.folder.name}/install.sh python")


if __name__ == "__main__":
    main(sys.argv[1:])
