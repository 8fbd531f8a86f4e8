"""SentCode: what the replicas of a sweep's trials run, brought to the scheduler.

Concurrency: any thread may call.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler.client.carriers import Parts
from scheduler.client.connection import SchedulerClient
from scheduler.errors import SchedulerError
from trials.plain_words import one_line
from trials.spec import TrialSpec
from tuner_bridge.driving.left_out import IGNORE_FILE, Walk, holds_private_key
from tuner_bridge.errors import InvalidSweep

logger = logging.getLogger(__name__)


class SentCode:
    """Code of a sweep as packages that replicas on other machines unpack.

    ``folder``: how replicas on other machines find the working folder; None where they run on this one.
    """

    def __init__(self, folder: CodeOnCluster | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._contents: dict[str, bytes | Parts] = {}
        """Contents that the scheduler has, or is to have, by digest."""
        self._sent: set[str] = set()

    def offer(self, contents: Mapping[str, bytes | Parts]) -> None:
        """Offer pickled code and data, to be sent with the first trial that names it."""
        with self._lock:
            self._contents.update(contents)

    def place(self, spec: TrialSpec, client: SchedulerClient) -> TrialSpec:
        """Send the code if the scheduler lacks it; return the spec that names it. May be repeated if it raises."""
        with self._lock:
            for digest in spec.code:
                self._send(digest, client)
            if self._folder is None:
                return spec
            placed = self._folder.place(spec)
            package = self._folder.package
            if package is not None:
                self._contents[package.digest] = package.content
                self._send(package.digest, client, f"sending the working folder to {client.url}: {package}")
        return placed

    def _send(self, digest: str, client: SchedulerClient, words: str = "") -> None:
        if digest in self._sent or digest not in self._contents:
            return
        if not client.request("GET", f"/packages/{digest}")["here"]:
            if words:
                print(f"elastune: {words}", file=sys.stderr)
            client.send(f"/packages/{digest}", self._contents[digest])
        self._sent.add(digest)

    def send_again(self, digests: Sequence[str], client: SchedulerClient) -> None:
        """Send code again: a scheduler that has moved may have lost what it was sent."""
        for digest in digests:
            content = self._contents.get(digest)
            if content is None:
                # Of an earlier run of this sweep: its code is gone. Those trials end when nobody can start them.
                time.sleep(1.0)
                continue
            try:
                client.send(f"/packages/{digest}", content)
            except SchedulerError as error:
                logger.warning("the sweep's code could not be sent again: %s", error)
                time.sleep(1.0)


@dataclass(slots=True)
class CodeOnCluster:
    """Place where the pods of a cluster find a sweep's code.

    ``where``: ``pack``, ``image``, or the path at which pods have the working folder.
    """

    where: str
    image: str
    package: Package | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> CodeOnCluster:
        """ELASTUNE_CODE (default: pack) and ELASTUNE_IMAGE (default: the study's or the cluster's)."""
        environ = os.environ if environ is None else environ
        where = environ.get("ELASTUNE_CODE", "pack")
        if where not in ("pack", "image") and not os.path.isabs(where):
            raise InvalidSweep(
                f"ELASTUNE_CODE is {where!r}; it must be 'pack', 'image', or the absolute path of this folder in the "
                "cluster's pods"
            )
        return cls(where, environ.get("ELASTUNE_IMAGE", ""))

    def place(self, spec: TrialSpec) -> TrialSpec:
        """Return the trial with what its replicas need to know; packs the folder at the first call.

        Raises InvalidSweep.
        """
        spec = replace(spec, image=spec.image or self.image)
        if self.where == "image":
            return spec
        if self.where != "pack":
            return replace(spec, moved_to=self.where)
        if self.package is None:
            self.package = pack(Path(spec.working_dir))
        return replace(spec, package=self.package.digest)


LARGEST_BYTES = 128 * 1024 * 1024
MOST_LISTED = 40


@dataclass(frozen=True, slots=True)
class Package:
    digest: str
    content: bytes
    files: tuple[tuple[str, int], ...]
    """Names and sizes in bytes, in order of name."""
    left_out: tuple[tuple[str, str], ...]
    """Names that somebody might miss, and why."""

    def __str__(self) -> str:
        """Describe what is sent, for people to check."""
        total = sum(size for _, size in self.files)
        lines = [f"{len(self.files)} files with {_size(total)}, packed to {_size(len(self.content))}:"]
        largest = sorted(self.files, key=lambda file: -file[1])[:MOST_LISTED]
        lines += [f"  {_size(size):>9}  {name}" for name, size in sorted(largest)]
        if len(self.files) > MOST_LISTED:
            lines.append(f"  and {len(self.files) - MOST_LISTED} smaller ones")
        lines += [f"  left out   {name}: {why}" for name, why in self.left_out[:MOST_LISTED]]
        if len(self.left_out) > MOST_LISTED:
            lines.append(f"  left out   and {len(self.left_out) - MOST_LISTED} more")
        return "\n".join(map(one_line, lines))


def pack(folder: Path) -> Package:
    """Pack a folder; raise InvalidSweep if it is too large, or cannot be read."""
    raw = io.BytesIO()
    sizes: list[tuple[int, str]] = []
    total = 0
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        walk = Walk(folder)
        for path in walk:
            name = path.relative_to(folder).as_posix()
            try:
                size = path.stat().st_size
                sizes.append((size, name))
                total += size
                content = path.read_bytes() if total <= LARGEST_BYTES else b""
                executable = os.access(path, os.X_OK)
            except OSError as error:
                raise InvalidSweep(
                    f"the working folder cannot be packed: {error}; name it in {IGNORE_FILE} if replicas do not need it"
                ) from error
            if holds_private_key(content):
                walk.left_out.append((name, "is a private key"))
                total -= sizes.pop()[0]
                continue
            if total > LARGEST_BYTES:
                largest = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for size, name in sorted(sizes)[:-4:-1])
                raise InvalidSweep(
                    f"the working folder {folder} has more than {LARGEST_BYTES // 2**20} MiB to send to the cluster; "
                    f"the largest so far: {largest}. Name data in {IGNORE_FILE}, or put code and data into an image "
                    "or on a volume and set ELASTUNE_CODE"
                )
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755 if executable else 0o644
            archive.addfile(entry, io.BytesIO(content))
    content = gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)
    return Package(
        hashlib.sha256(content).hexdigest(),
        content,
        tuple((name, size) for size, name in sizes),
        tuple(walk.left_out),
    )


def _size(amount: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
