"""Checkpoints on disk: written beside training, complete or absent, never half.

A checkpoint (`dist_core.state.manifests`) is written under another name and renamed: from then on this machine can read
it. Then it is flushed to disk and gets its checksum. A crash at any byte leaves the previous one in place. Loading
walks from the newest to the oldest and skips what does not verify.

Concurrency: one thread writes. What only an optimizer's step changes is copied while the next step computes its
gradients; what applies them waits for the copy (``settle``). The rest is copied at once. While the writer writes, a
newer copy replaces one that waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_core.errors import InvalidCheckpoint
from dist_core.older_python import sha256_of
from dist_core.state.copies import Copies, Copying, host_memory_for
from dist_core.state.manifests import (
    BOOT,
    CHECKSUM,
    FORMAT_VERSION,
    MANIFEST,
    PREFIX,
    STATE,
    is_flushed,
    present_boot,
    sequences,
)
from dist_core.state.packing import pack, unpack

logger = logging.getLogger(__name__)

KEPT = 2
ABANDONED_SECONDS = 600.0
"""A checkpoint to which nothing was written for so long is nobody's any more."""


def write_checkpoint(
    folder: Path,
    sequence: int,
    state: dict[str, Any],
    summary: dict[str, Any],
    *,
    readable: Callable[[], None] = lambda: None,
) -> Path:
    """Write and flush one checkpoint, then remove all but the newest ``KEPT``. Raises OSError (a full disk).

    ``readable``: called once it may be read on this machine, before it is flushed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"partial-{sequence}-{os.getpid()}"
    final = folder / f"{PREFIX}{sequence:08d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        torch.save(state, partial / STATE)
        manifest = {"format": FORMAT_VERSION, "sequence": sequence, BOOT: present_boot(), "summary": summary}
        (partial / MANIFEST).write_text(json.dumps(manifest))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        readable()
        flush(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        raise
    for old in (*(path for _, path in sequences(folder)[KEPT:]), *_abandoned(folder)):
        shutil.rmtree(old, ignore_errors=True)
    return final


def flush(path: Path) -> None:
    """Have a checkpoint outlive the machine's memory: flush its state, and give it its checksum. Raises OSError."""
    with open(path / STATE, "rb") as file:
        os.fsync(file.fileno())
        checksum = sha256_of(file)
    manifest = {key: value for key, value in json.loads((path / MANIFEST).read_text()).items() if key != BOOT}
    arriving = path / f"{MANIFEST}-{os.getpid()}"
    with open(arriving, "w") as file:
        json.dump({**manifest, CHECKSUM: checksum}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(arriving, path / MANIFEST)
    _flush_folder(path)
    _flush_folder(path.parent)


def _abandoned(folder: Path) -> list[Path]:
    """Return what a writer that was killed has left; another replica may be writing at this moment."""
    abandoned = []
    for partial in folder.glob("partial-*"):
        with contextlib.suppress(OSError):
            touched = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
            if time.time() - touched > ABANDONED_SECONDS:
                abandoned.append(partial)
    return abandoned


def verify(path: Path, manifest: dict[str, Any]) -> None:
    """Check that the state is the one that was written. Raises InvalidCheckpoint."""
    if not is_flushed(manifest):
        # This machine has it in memory, as it was written.
        return
    try:
        with open(path / STATE, "rb") as file:
            digest = sha256_of(file)
    except OSError as error:
        raise InvalidCheckpoint(f"checkpoint {path} cannot be read: {error}") from error
    if manifest.get(CHECKSUM) != digest:
        raise InvalidCheckpoint(f"checkpoint {path} does not match its checksum; it was damaged after it was written")


def load_checkpoint(path: Path, *, in_place: bool = False) -> dict[str, Any]:
    """Load a checkpoint; with ``in_place`` tensors are read from the file when they are used."""
    state: dict[str, Any] = torch.load(path / STATE, weights_only=True, map_location="cpu", mmap=in_place)
    return state


@dataclass(frozen=True, slots=True)
class _Waiting:
    """State that is to be written; its tensors are still being copied."""

    state: dict[str, Any]
    summary: dict[str, Any]
    copying: Copying


class CheckpointWriter:
    """Writes copies of the state in the background, newest first; ``on_error`` hears of failures (a full disk)."""

    def __init__(
        self, folder: Path, *, on_error: Callable[[str], None], on_written: Callable[[], None] = lambda: None
    ) -> None:
        """Write into ``folder``.

        Call ``on_written`` when a checkpoint can be read on this machine, and again once it is on disk.
        """
        self.folder = folder
        self._on_error = on_error
        self._on_written = on_written
        self._condition = threading.Condition()
        self._waiting: _Waiting | None = None
        self._busy = False
        self._kept: list[torch.Tensor] = []
        self._copies = Copies()
        self._copying: Copying | None = None
        """The latest one whose sources must not change before it is settled."""
        self._thread: threading.Thread | None = None
        self.write_seconds = 0.0
        """Processor time the last write took."""

    def save(
        self,
        state: dict[str, Any],
        summary: dict[str, Any],
        *,
        wait: bool = False,
        keeps: Callable[[torch.Tensor], bool] = lambda tensor: False,
    ) -> None:
        """Write the state as it is now; with ``wait``, return when it is on disk (or has failed).

        Tensors that ``keeps`` names must not change before ``settle``; the others are copied here.
        """
        tensors: list[torch.Tensor] = []
        skeleton = pack(state, tensors)
        with self._condition:
            if self._unfinished:
                # The memory of the last copy is being written from: this one gets memory of its own.
                targets = [host_memory_for(tensor) for tensor in tensors]
                later = set()
            else:
                targets = self._memory_for(tensors)
                later = {index for index, tensor in enumerate(tensors) if keeps(tensor)}
            pairs = list(zip(targets, tensors, strict=True))
            copying = self._copies.begin(
                now=[pair for index, pair in enumerate(pairs) if index not in later],
                later=[pair for index, pair in enumerate(pairs) if index in later],
            )
            if later:
                self._copying = copying
            if self._waiting is not None:
                self._waiting.copying.give_up()
            self._waiting = _Waiting(unpack(skeleton, targets), summary, copying)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="elastune-checkpoint", daemon=True)
                self._thread.start()
            self._condition.notify_all()
            if wait:
                self._condition.wait_for(lambda: not self._unfinished)

    def settle(self) -> None:
        """Wait until everything has been copied: from then on all tensors may change."""
        if self._copying is not None:
            self._copying.settle()
            self._copying = None

    def _memory_for(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Kept from the last time: fresh memory takes longer to get than to fill."""
        fits = len(self._kept) == len(tensors) and all(
            kept.shape == tensor.shape and kept.dtype == tensor.dtype
            for kept, tensor in zip(self._kept, tensors, strict=True)
        )
        if not fits:
            self._kept = [host_memory_for(tensor) for tensor in tensors]
        return list(self._kept)

    @property
    def busy(self) -> bool:
        with self._condition:
            return self._unfinished

    @property
    def _unfinished(self) -> bool:
        return self._busy or self._waiting is not None

    def _write_all(self) -> None:
        while True:
            with self._condition:
                while self._waiting is None:
                    self._condition.wait()
                waiting, self._waiting, self._busy = self._waiting, None, True
            try:
                waiting.copying.finish()
                # Numbered by what is on disk now: another replica may have been rank 0, and written, in between.
                existing = sequences(self.folder)
                began = time.thread_time()
                number = existing[0][0] + 1 if existing else 1
                write_checkpoint(self.folder, number, waiting.state, waiting.summary, readable=self._on_written)
                self.write_seconds = time.thread_time() - began
                self._on_written()
            except Exception as error:
                message = f"no checkpoint was written to {self.folder}: {error}; the previous one is kept"
                logger.warning(message)
                self._on_error(message)
            finally:
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
