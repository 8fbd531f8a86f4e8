"""The agent's line to its scheduler: what it has to say, and what it is to do, as JSON over HTTP.

Every message can be repeated, and the scheduler may be restarted at any moment, perhaps at another address (then the
server file names it).
"""

from __future__ import annotations

import base64
import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2

from dist_core.link.refusals import refusal
from trials.agents.archives import packed
from trials.agents.words import News, Orders

CHECKPOINT_TIMEOUT = httpx2.Timeout(600.0, connect=3.0)
"""What is large has to reach a disk before it is answered."""
WAIT_SECONDS = 5.0
"""The scheduler answers by then, also where there is nothing to do."""


class Refused(Exception):
    """The scheduler does not want this agent."""


class Line:
    """Thread-safe. ``server_file``: names the scheduler's present address, where it can be read."""

    def __init__(self, url: str, token: str, server_file: Path | None) -> None:
        self._url = url
        self._token = token
        self._server_file = server_file
        self._lock = threading.Lock()
        self._client = self._connect(url)
        self._left: list[httpx2.Client] = []
        """Of addresses where the scheduler is not any more; other threads may still wait for an answer there."""
        self._answered_at = time.monotonic()

    def _connect(self, url: str) -> httpx2.Client:
        return httpx2.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=httpx2.Timeout(WAIT_SECONDS + 10.0, connect=3.0),
            trust_env=False,
            verify=url.startswith("https:"),
        )

    @property
    def lost_for(self) -> float:
        """Seconds since the scheduler last answered."""
        return time.monotonic() - self._answered_at

    @property
    def url(self) -> str:
        return self._url

    def say(self, news: News, heard: int, *, wait: bool) -> Orders | None:
        """Orders; None where the scheduler did not answer. ``wait``: until there are later ones than ``heard``, or for
        a while.

        Raises Refused where the scheduler is not this agent's.
        """
        body = {**asdict(news), "in_use": sorted(news.in_use)}
        try:
            params = {"heard": heard, "wait": WAIT_SECONDS if wait else 0.0}
            response = self._client.post("/agents/turn", json=body, params=params)
        except httpx2.TransportError:
            self._follow_server()
            return None
        why = refusal(response.content) if 400 <= response.status_code < 500 else None
        if why is not None and not self._follow_server():
            raise Refused(why)
        if response.status_code >= 400:
            return None
        self._answered_at = time.monotonic()
        answer: dict[str, Any] = response.json()
        return Orders(
            roster=answer["roster"],
            version=answer["version"],
            numbers=tuple(answer["numbers"]),
            launch=tuple(answer["launch"]),
            stop=answer["stop"],
            noted=tuple(answer["noted"]),
            end=answer["end"],
        )

    def send_log(self, replica_id: str, at: int, part: bytes) -> int | None:
        """How many bytes of the replica's log the scheduler has then; None where it did not answer."""
        body = {"replica": replica_id, "at": at, "part": base64.b64encode(part).decode()}
        try:
            response = self._client.post("/agents/logs", json=body)
        except httpx2.TransportError:
            return None
        return int(response.json()["have"]) if response.status_code < 300 else None

    def send_checkpoint(self, trial_id: str, name: str, folder: Path) -> bool | None:
        """Whether the scheduler keeps it, or does not want it; None where it did not answer. Raises OSError."""
        try:
            response = self._client.put(
                f"/agents/checkpoints/{trial_id}/{name}", content=packed(folder), timeout=CHECKPOINT_TIMEOUT
            )
        except httpx2.TransportError:
            return None
        return response.status_code < 300

    def checkpoints(self, trial_id: str) -> list[str]:
        """Names of those that the trial is to go on from. Raises OSError where that is not told."""
        try:
            response = self._client.get(f"/agents/checkpoints/{trial_id}")
        except httpx2.TransportError as error:
            raise OSError(str(error)) from error
        if response.status_code >= 400:
            raise OSError(f"the scheduler answered {response.status_code}")
        return [str(each) for each in response.json()]

    def fetch_checkpoint(self, trial_id: str, name: str, archive: Path) -> None:
        """Raises OSError."""
        address = f"/agents/checkpoints/{trial_id}/{name}"
        try:
            with (
                self._client.stream("GET", address, timeout=CHECKPOINT_TIMEOUT) as response,
                open(archive, "wb") as file,
            ):
                if response.status_code >= 400:
                    raise OSError(f"the scheduler answered {response.status_code}")
                file.writelines(response.iter_raw())
        except httpx2.TransportError as error:
            raise OSError(str(error)) from error

    def _follow_server(self) -> bool:
        """Whether the scheduler is at another address now."""
        if self._server_file is None:
            return False
        try:
            url = json.loads(self._server_file.read_text())["url"]
        except (OSError, ValueError, KeyError):
            return False
        with self._lock:
            if url == self._url:
                return False
            self._left.append(self._client)
            self._url, self._client = url, self._connect(url)
            return True

    def close(self) -> None:
        for client in (*self._left, self._client):
            client.close()
