"""SchedulerClient: the API as Python calls, for tuner bridges and the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from dist_core.link.refusals import refusal
from scheduler.client.carriers import Answer, Carrier, NoAnswer, Parts, Request
from scheduler.client.finding import Named, default_state_dir, named_scheduler
from scheduler.errors import NotAuthorized, NotRunning, RequestRefused, SchedulerError, SchedulerUnreachable
from scheduler.state_folder import read_server_file


class SchedulerClient:
    """Thread-safe HTTP connection to one scheduler.

    Every method raises SchedulerUnreachable, NotAuthorized or RequestRefused.
    """

    def __init__(self, url: str, token: str, *, carrier: Carrier | None = None) -> None:
        """Connect lazily: the first question shows whether anybody answers."""
        self.url = url.rstrip("/")
        self.token = token
        try:
            self._carrier = carrier or Carrier(self.url)
        except NoAnswer as error:
            raise self._nobody(error) from error

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> SchedulerClient | None:
        """Return the scheduler that the environment or elastune.toml names; None where there is none.

        ELASTUNE_URL comes first, then the entry of elastune.toml that ELASTUNE_SCHEDULER names, then its default.

        The token comes from ELASTUNE_TOKEN, or from the local state folder when its scheduler has that address.
        """
        environ = os.environ if environ is None else environ
        url = environ.get("ELASTUNE_URL")
        if not url:
            named = named_scheduler(environ.get("ELASTUNE_SCHEDULER", ""), environ)
            return None if named is None else cls.of_named(named)
        token = environ.get("ELASTUNE_TOKEN") or _local_token(url)
        if not token:
            cls._reach(url)
            raise NotAuthorized(
                f"ELASTUNE_URL is {url} but no token is known for it; set ELASTUNE_TOKEN as `elastune up` printed "
                "when it started (the token is in the file 'token' of the scheduler's state folder)"
            )
        return cls(url, token).checked()

    @classmethod
    def of_named(cls, named: Named) -> SchedulerClient:
        if named.state_dir is not None:
            return of_folder(named.state_dir)
        return cls(named.url, named.token).checked()

    def checked(self) -> SchedulerClient:
        """Itself, once a scheduler has answered and taken the token; else it is closed."""
        try:
            self.check()
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def _reach(cls, url: str) -> None:
        """Raise SchedulerUnreachable unless something answers; needs no token."""
        client = cls(url, "none")
        try:
            client.request("GET", "/healthz")
        finally:
            client.close()

    def close(self) -> None:
        self._carrier.close()

    def send(self, path: str, content: bytes | Parts) -> None:
        """Send bytes with PUT; raise as ``request`` does."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(content))}
        self._exchange(Request("PUT", path, content, headers))

    def check(self) -> None:
        """Raise unless a scheduler answers and takes the token."""
        self.request("GET", "/whoami")

    def request(self, method: str, path: str, body: Any = None, *, params: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the answer's JSON. ``params``: of the query; ``body``: a JSON value."""
        if params:
            path = f"{path}?{urlencode([(name, _word(value)) for name, value in params.items()])}"
        if body is None:
            return self._exchange(Request(method, path))
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        return self._exchange(Request(method, path, content, {"Content-Type": "application/json"}))

    def _exchange(self, request: Request) -> Any:
        headers = {**request.headers, "Authorization": f"Bearer {self.token}"}
        try:
            answer = self._carrier.ask(replace(request, headers=headers))
        except NoAnswer as error:
            raise self._nobody(error) from error
        if answer.status < 400:
            try:
                return answer.value
            except ValueError as error:
                raise self._somebody_else(answer) from error
        reason = refusal(answer.content)
        if answer.status >= 500:
            said = reason or answer.text[:300] or f"HTTP status {answer.status}"
            raise SchedulerUnreachable(f"the scheduler at {self.url} has a problem and cannot answer: {said}")
        if reason is None:
            raise self._somebody_else(answer)
        if answer.status in (401, 403):
            raise NotAuthorized(f"the scheduler at {self.url} refused the token: {reason}")
        raise RequestRefused(reason)

    def _somebody_else(self, answer: Answer) -> SchedulerUnreachable:
        return SchedulerUnreachable(
            f"what answers at {self.url} is not an Elastune scheduler: HTTP status {answer.status} "
            f"{answer.text[:100]!r}; correct ELASTUNE_URL, or check the proxy or ingress at that address"
        )

    def _nobody(self, error: NoAnswer) -> SchedulerUnreachable:
        return SchedulerUnreachable(
            f"no scheduler answers at {self.url} ({error}); start one with `elastune up`, or unset ELASTUNE_URL "
            "to use an embedded one"
        )


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _local_token(url: str) -> str | None:
    folder = default_state_dir()
    server = read_server_file(folder)
    if server is None or server.get("url") != url.rstrip("/"):
        return None
    try:
        return (folder / "token").read_text().strip()
    except OSError:
        return None


def of_folder(folder: Path) -> SchedulerClient:
    """Return the scheduler that runs on a state folder."""
    server = read_server_file(folder)
    if server is None:
        raise SchedulerError(
            f"no scheduler has run on {folder}; start one with `elastune up`, set ELASTUNE_URL, or name the folder of "
            "a sweep's own scheduler with --state-dir"
        )
    try:
        return SchedulerClient(server["url"], (folder / "token").read_text().strip()).checked()
    except SchedulerUnreachable as error:
        raise NotRunning(
            f"the scheduler of {folder} is not running (it was last at {server['url']}); a sweep's own scheduler "
            "ends with its sweep. Start one with `elastune up --state-dir`",
            folder,
        ) from error
