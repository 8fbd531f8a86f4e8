"""``elastune nni register`` and ``unregister``: whether NNI knows the platform ``tuner_bridge``.

NNI keeps registered services in a file of its environment, and imports every one of them for every experiment. The
file is written here as ``nnictl trainingservice register --package tuner_bridge`` does, without the parts of NNI that
need more packages.
"""

from __future__ import annotations

import importlib.util
import json
import stat
from pathlib import Path
from typing import Any

import click

from scheduler.errors import SchedulerError
from scheduler.state_folder import write_durably

PLATFORM = "tuner_bridge"


@click.group()
def commands() -> None:
    """Run NNI experiments on elastune."""


@commands.command()
def register() -> None:
    """Register Elastune with NNI, as its platform 'tuner_bridge' in this environment."""
    path = _file()
    from tuner_bridge.nni.training_service import nni_training_service_info as info

    services = _read(path)
    services[PLATFORM] = {"nodeModulePath": str(info.node_module_path), "nodeClassName": info.node_class_name}
    _write(path, services)
    click.echo(f"registered in {path}; an experiment uses it with 'trainingService: {{platform: {PLATFORM}}}'")


@commands.command()
def unregister() -> None:
    """Remove Elastune from NNI.

    Do this before elastune is uninstalled: NNI starts no experiment while a platform of its list is missing.
    """
    path = _file()
    services = _read(path)
    if services.pop(PLATFORM, None) is None:
        click.echo(f"{PLATFORM} is not registered in {path}; nothing to do")
        return
    _write(path, services)
    click.echo(f"no longer registered in {path}")


def _file() -> Path:
    if importlib.util.find_spec("nni") is None:
        raise SchedulerError("NNI is not installed here; pip install 'elastune[nni]'")
    from nni.runtime.config import get_config_file

    return Path(get_config_file("training_services.json"))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise SchedulerError(f"{path} is not what NNI writes there (a JSON object); repair it, or move it away")
    return document


def _write(path: Path, services: dict[str, Any]) -> None:
    """Write the file whole or not at all: NNI reads it for every experiment."""
    path = path.resolve()
    mode = stat.S_IMODE(path.stat().st_mode)
    write_durably(path, json.dumps(services, indent=4))
    # Others may share this environment.
    path.chmod(mode)
