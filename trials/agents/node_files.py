"""Files of a node that shares none with its scheduler.

A sweep's working folder comes packed and is unpacked once; what replicas write stays here, below a scratch folder that
ends with the agent. Their logs are sent to the scheduler by `LogShipping`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from trials.errors import LaunchFailed
from trials.inside.packages import python_path
from trials.inside.user_code import MOVED, moved
from trials.launch.base import LaunchRequest

Fetch = Callable[[Mapping[str, str], str, Path], None]
"""Unpacks the package of that digest, for a replica with this environment, into a folder. Raises OSError."""


class NodeFiles:
    """The control thread of an agent makes all calls; packages come in another one."""

    def __init__(self, fetch: Fetch, above: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="elastune-", dir=above))
        self._fetch = fetch
        self._packages: dict[str, Future[Path]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="packages")

    def place(self, request: LaunchRequest) -> LaunchRequest | None:
        """The request as it is on this node; None while its code is on its way. Raises LaunchFailed."""
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
        return self._placed(request, code)

    def _unpacked(self, request: LaunchRequest) -> Path:
        folder = self.folder / "code" / request.package
        self._fetch(request.environ, request.package, folder)
        return folder

    def _placed(self, request: LaunchRequest, code: Path | None) -> LaunchRequest:
        """``code``: where its working folder is here; None where it is under its own name, or installed."""
        old = request.working_dir
        new = str(code) if code is not None else old if os.path.isdir(old) else str(self.folder)
        environ = {name: value for name, value in request.environ.items() if name != "ELASTUNE_SERVER_FILE"}
        environ["ELASTUNE_CHECKPOINT_DIR"] = str(self.folder / "checkpoints" / request.trial_id)
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
