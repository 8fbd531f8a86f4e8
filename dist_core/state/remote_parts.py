"""RemoteParts: another process's part of a trial's state, of which rows are fetched when they are used."""

from __future__ import annotations

import io
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlencode

import torch

from dist_core.errors import PeerLost
from dist_core.state.served_parts import SLOT, bytes_of

SECONDS = 60.0
"""Longest wait for an answer."""


class RemoteParts:
    """Of a `ServedParts` at this address. Raises PeerLost where its process is gone. For one thread."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._line = HTTPConnection(host, port, timeout=SECONDS)
        self._headers = {"Authorization": f"Bearer {key}"}

    def states(self) -> dict[str, Any]:
        """All states by name; in place of large rows `RemoteRows`."""
        content = bytes(self._get("/frame"))
        found: dict[str, Any] = self._with_rows(torch.load(io.BytesIO(content), weights_only=True))
        return found

    def rows(self, slot: int, first: int, into: torch.Tensor) -> None:
        """Fill ``into`` with rows from the ``first`` on."""
        words = urlencode({"slot": slot, "first": first, "end": first + len(into)})
        self._get(f"/piece?{words}", bytes_of(into))

    def done(self, who: str) -> None:
        """Nothing more is asked for by the process of that name."""
        self._get(f"/done?{urlencode({'who': who})}")
        self.close()

    def close(self) -> None:
        self._line.close()

    def _get(self, path: str, into: memoryview | None = None) -> memoryview:
        try:
            self._line.request("GET", path, headers=self._headers)
            answer = self._line.getresponse()
            size = int(answer.headers.get("Content-Length", "0"))
            if answer.status != 200 or (into is not None and len(into) != size):
                raise PeerLost(f"{path} of a part of the trial's state: {answer.status} {answer.read()[:200]!r}")
            place = memoryview(bytearray(size)) if into is None else into
            read = 0
            while read < size:
                count = answer.readinto(place[read:])
                if not count:
                    raise PeerLost(f"a part of the trial's state ended after {read} of {size} bytes")
                read += count
            answer.read()
            return place
        except (OSError, HTTPException) as error:
            raise PeerLost(f"the process that holds a part of the trial's state is gone: {error}") from error

    def _with_rows(self, value: Any) -> Any:
        if isinstance(value, dict):
            if SLOT in value:
                return RemoteRows(self, value[SLOT], tuple(value["shape"]), getattr(torch, value["dtype"]))
            return {key: self._with_rows(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._with_rows(item) for item in value]
        return value


class RemoteRows:
    """Rows of a tensor in another process: as many as it says, fetched where they are taken."""

    def __init__(self, parts: RemoteParts, slot: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._parts = parts
        self._slot = slot
        self._shape = shape
        self._dtype = dtype

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, wanted: slice) -> torch.Tensor:
        first, end, _ = wanted.indices(len(self))
        found = torch.empty((max(0, end - first), *self._shape[1:]), dtype=self._dtype)
        if found.numel():
            self._parts.rows(self._slot, first, found)
        return found


def fetched(value: Any) -> Any:
    """The value with all rows here."""
    if isinstance(value, RemoteRows):
        return value[:]
    if isinstance(value, dict):
        return {key: fetched(item) for key, item in value.items()}
    if isinstance(value, list):
        return [fetched(item) for item in value]
    return value
