"""``prepare_data`` of modules and data modules in a trial: once on each machine, whoever comes first."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from dist_core.lightning.package import _DataConnector
from dist_core.preparation.claims import Claims
from dist_core.trial.current import get_core

LOOK_SECONDS = 0.1


class ElasticDataConnector(_DataConnector):
    def prepare_data(self) -> None:
        environment = get_core().environment
        if environment is None:
            super().prepare_data()
            return
        folder = environment.checkpoint_dir
        folder.mkdir(parents=True, exist_ok=True)
        name = f"lightning-data-{socket.gethostname()}"
        done, claims = folder / f"{name}.done", Claims(folder)
        while not done.exists():
            with claims.holding(name) as mine:
                if mine and not done.exists():
                    self._prepare(done)
                    return
            time.sleep(LOOK_SECONDS)

    def _prepare(self, done: Path) -> None:
        trainer: Any = self.trainer
        # Lightning would make a process group to wait in, of replicas that have not met.
        for each in (trainer.datamodule, trainer.lightning_module):
            if each is not None:
                each.prepare_data()
        done.touch()
