"""Files of a node that shares none with its scheduler.

A sweep's working folder comes packed and is unpacked once; what replicas write lies here, below a scratch folder that
ends with the agent. Logs and checkpoints are sent to the scheduler, and a trial that goes on here gets its newest ones.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from trials.agents.archives import NAME, newest, unpack
from trials.errors import LaunchFailed
from trials.inside.packages import python_path
from trials.inside.user_code import MOVED, moved
from trials.launch.base import LaunchRequest

Fetch = Callable[[Mapping[str, str], str, Path], None]
"""Unpacks the package of that digest, for a replica with this environment, into a folder. Raises OSError."""


class KeptCheckpoints(Protocol):
    """The scheduler's checkpoints; all raise OSError."""

    def checkpoints(self, trial_id: str) -> list[str]: ...

    def fetch_checkpoint(self, trial_id: str, name: str, archive: Path) -> None: ...


class NodeFiles:
    """The control thread of an agent makes all calls; packages and checkpoints come in another one."""

    def __init__(self, fetch: Fetch, above: Path | None = None, kept: KeptCheckpoints | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="elastune-", dir=above))
        self.on_fetched: Callable[[str, str], None] = lambda trial_id, name: None
        """Told of each checkpoint that has come: its trial, its name."""
        self._fetch = fetch
        self._kept = kept
        self._packages: dict[str, Future[Path]] = {}
        self._coming: dict[str, Future[None]] = {}
        """Checkpoints to fetch for each replica that is to start."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="packages")

    @property
    def checkpoints(self) -> Path:
        """Return the folder of checkpoints, with a folder for each trial in it."""
        return self.folder / "checkpoints"

    def place(self, request: LaunchRequest) -> LaunchRequest | None:
        """Return the request as it is on this node; None while its code is on its way. Raises LaunchFailed."""
        code: Path | None = Path(request.moved_to) if request.moved_to else None
        if request.package:
            coming = self._packages.get(request.package)
            if coming is None:
                coming = self._packages[request.package] = self._thread.submit(self._unpacked, request)
            if not coming.done():
                return None
            try:
                code = coming.result()
            except Exception as error:
                # The next replica that needs it asks again.
                del self._packages[request.package]
                raise LaunchFailed(f"the packed working folder cannot be used on {request.node}: {error}") from error
        if not self._has_checkpoints(request):
            return None
        return self._placed(request, code)

    def _has_checkpoints(self, request: LaunchRequest) -> bool:
        if self._kept is None:
            return True
        coming = self._coming.get(request.replica_id)
        if coming is None:
            coming = self._coming[request.replica_id] = self._thread.submit(self._get, self._kept, request.trial_id)
        if not coming.done():
            return False
        del self._coming[request.replica_id]
        try:
            coming.result()
        except (OSError, tarfile.TarError) as error:
            # To begin again without it would throw away what the trial has learned.
            raise LaunchFailed(f"the trial's checkpoint cannot be fetched to {request.node}: {error}") from error
        return True

    def _get(self, kept: KeptCheckpoints, trial_id: str) -> None:
        folder = self.checkpoints / trial_id
        for name in kept.checkpoints(trial_id):
            if not NAME.match(name) or newest(folder).get(name.rpartition("/")[0], "") >= name:
                continue
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix="checkpoint-") as archive:
                kept.fetch_checkpoint(trial_id, name, Path(archive.name))
                unpack(Path(archive.name), folder / name)
            self.on_fetched(trial_id, name)

    def _unpacked(self, request: LaunchRequest) -> Path:
        folder = self.folder / "code" / request.package
        self._fetch(request.environ, request.package, folder)
        return folder

    def _placed(self, request: LaunchRequest, code: Path | None) -> LaunchRequest:
        """Place a request's paths on this node; ``code``: its working folder here, None if the name is the same."""
        old = request.working_dir
        new = str(code) if code is not None else old if os.path.isdir(old) else str(self.folder)
        environ = {name: value for name, value in request.environ.items() if name != "ELASTUNE_SERVER_FILE"}
        environ["ELASTUNE_CHECKPOINT_DIR"] = str(self.checkpoints / request.trial_id)
        if "ELASTUNE_PREPARED_DIR" in environ:
            environ["ELASTUNE_PREPARED_DIR"] = str(
                self.folder / "prepared" / Path(environ["ELASTUNE_PREPARED_DIR"]).name
            )
        if code is not None:
            environ[MOVED] = f"{old}={new}"
        return replace(
            request,
            environ=environ,
            working_dir=new,
            python_path=tuple(python_path(request.python_path, lambda path: moved(path, old, new))),
            log=self.log(request.replica_id),
        )

    def log(self, replica_id: str) -> Path:
        return self.folder / "logs" / f"{replica_id}.log"

    def remove(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)
