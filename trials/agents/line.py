"""The agent's line to its scheduler: what it has to say, and what it is to do, as JSON over HTTP.

Every message can be repeated, and the scheduler may be restarted at any moment, perhaps at another address (then the
server file names it).
"""

from __future__ import annotations

import base64
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2

from dist_core.link.line import Line
from trials.agents.archives import packed
from trials.agents.words import News, Orders

CHECKPOINT_TIMEOUT = httpx2.Timeout(600.0, connect=3.0)
"""Timeout for checkpoints: what is large has to reach a disk before it is answered."""
WAIT_SECONDS = 5.0
"""The scheduler answers by then, also where there is nothing to do."""


class Refused(Exception):
    """The scheduler does not want this agent."""


class AgentLine(Line):
    """Connection of an agent to its scheduler.

    ``server_file``: names the scheduler's present address, where it can be read.
    """

    def __init__(self, url: str, token: str, server_file: Path | None) -> None:
        timeout = httpx2.Timeout(WAIT_SECONDS + 10.0, connect=3.0)
        super().__init__(url, lambda: token, server_file=server_file, timeout=timeout)

    def say(self, news: News, heard: int, *, wait: bool) -> Orders | None:
        """Return this agent's orders; None where the scheduler did not answer.

        ``wait``: until there are later ones than ``heard``, or for a while.

        Raises Refused where the scheduler is not this agent's.
        """
        body = {**asdict(news), "in_use": sorted(news.in_use)}
        try:
            params = {"heard": heard, "wait": WAIT_SECONDS if wait else 0.0}
            response = self.send("POST", "/agents/turn", json=body, params=params)
        except httpx2.TransportError:
            self.follow()
            return None
        why = self.refused(response)
        if why is not None and not self.follow():
            raise Refused(why)
        if response.status_code >= 400:
            return None
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
        """Send a part of a replica's log; return the bytes that the scheduler has, None where it did not answer."""
        body = {"replica": replica_id, "at": at, "part": base64.b64encode(part).decode()}
        try:
            response = self.send("POST", "/agents/logs", json=body)
        except httpx2.TransportError:
            return None
        return int(response.json()["have"]) if response.status_code < 300 else None

    def send_checkpoint(self, trial_id: str, name: str, folder: Path) -> bool | None:
        """Send a checkpoint; return whether it is kept or unwanted, None where nobody answered. Raises OSError."""
        try:
            response = self.send(
                "PUT", f"/agents/checkpoints/{trial_id}/{name}", content=packed(folder), timeout=CHECKPOINT_TIMEOUT
            )
        except httpx2.TransportError:
            return None
        return response.status_code < 300

    def checkpoints(self, trial_id: str) -> list[str]:
        """Names of those that the trial is to go on from. Raises OSError where that is not told."""
        try:
            response = self.send("GET", f"/agents/checkpoints/{trial_id}")
        except httpx2.TransportError as error:
            raise OSError(str(error)) from error
        if response.status_code >= 400:
            raise OSError(f"the scheduler answered {response.status_code}")
        return [str(each) for each in response.json()]

    def fetch_checkpoint(self, trial_id: str, name: str, archive: Path) -> None:
        """Fetch a checkpoint into ``archive``; raise OSError."""
        address = f"/agents/checkpoints/{trial_id}/{name}"
        try:
            with (
                self.stream("GET", address, timeout=CHECKPOINT_TIMEOUT) as response,
                open(archive, "wb") as file,
            ):
                if response.status_code >= 400:
                    raise OSError(f"the scheduler answered {response.status_code}")
                file.writelines(response.iter_raw())
        except httpx2.TransportError as error:
            raise OSError(str(error)) from error
