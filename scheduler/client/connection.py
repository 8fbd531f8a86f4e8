"""SchedulerClient: the API as Python calls, for tuner bridges and the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

from dist_core.link.refusals import refusal
from scheduler.client.finding import Named, named_scheduler
from scheduler.client.places import default_state_dir
from scheduler.errors import NotAuthorized, NotRunning, RequestRefused, SchedulerError, SchedulerUnreachable
from scheduler.state_folder import is_held, read_server_file


class SchedulerClient:
    """Thread-safe. Every method raises SchedulerUnreachable, NotAuthorized or RequestRefused."""

    def __init__(
        self, url: str, token: str, *, transport: httpx2.BaseTransport | None = None, quick: bool = False
    ) -> None:
        """``quick``: for a few questions of one thread, with the connection that is there soonest; whether anybody
        answers shows the first of them."""
        self.url = url.rstrip("/")
        self.token = token
        if quick and transport is None and self.url.startswith("http://"):
            from scheduler.client.quick import QuickTransport

            transport = QuickTransport(self.url)
        self._client = httpx2.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx2.Timeout(40.0, connect=3.0),
            limits=httpx2.Limits(max_connections=200),
            trust_env=False,
            # Certificates are read where there are any: that takes longer than most questions.
            verify=self.url.startswith("https"),
            transport=transport,
        )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None, *, quick: bool = False) -> SchedulerClient | None:
        """The scheduler that ELASTUNE_URL names, else the one of elastune.toml that ELASTUNE_SCHEDULER names or that is
        its default; None where there is none.

        The token comes from ELASTUNE_TOKEN, or from the local state folder when its scheduler has that address.
        """
        environ = os.environ if environ is None else environ
        url = environ.get("ELASTUNE_URL")
        if not url:
            named = named_scheduler(environ.get("ELASTUNE_SCHEDULER", ""), environ)
            return None if named is None else cls.of_named(named, quick=quick)
        token = environ.get("ELASTUNE_TOKEN") or _local_token(url)
        if not token:
            cls._reach(url)
            raise NotAuthorized(
                f"ELASTUNE_URL is {url} but no token is known for it; set ELASTUNE_TOKEN as `elastune up` said when it "
                "started (the token lies in the scheduler's state folder)"
            )
        client = cls(url, token, quick=quick)
        return client if quick else client.checked()

    @classmethod
    def of_named(cls, named: Named, *, quick: bool = False) -> SchedulerClient:
        """The one that elastune.toml tells of."""
        if named.state_dir is not None:
            return of_folder(named.state_dir, quick=quick)
        client = cls(named.url, named.token, quick=quick)
        return client if quick else client.checked()

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
        """Raises SchedulerUnreachable unless something answers; needs no token."""
        client = cls(url, "none")
        try:
            client.request("GET", "/healthz")
        finally:
            client.close()

    def close(self) -> None:
        self._client.close()

    def send(self, path: str, content: bytes) -> None:
        """PUT bytes; raises as `request` does."""
        self.request("PUT", path, None, content=content, headers={"Content-Type": "application/octet-stream"})

    def check(self) -> None:
        """Raises unless a scheduler answers and takes the token."""
        self.request("GET", "/whoami")

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        try:
            if body is not None:
                options["json"] = body
            response = self._client.request(method, path, **options)
        except (httpx2.TransportError, httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise SchedulerUnreachable(
                f"no scheduler answers at {self.url} ({error}); start one with `elastune up`, or unset ELASTUNE_URL "
                "to use an embedded one"
            ) from error
        if response.status_code < 400:
            return response.json() if response.content else None
        reason = refusal(response.content)
        if response.status_code >= 500:
            said = reason or response.text[:300] or f"HTTP status {response.status_code}"
            raise SchedulerUnreachable(f"the scheduler at {self.url} cannot work now: {said}")
        if reason is None:
            raise SchedulerUnreachable(
                f"what answers at {self.url} is not an Elastune scheduler: HTTP status {response.status_code} "
                f"{response.text[:100]!r}; correct ELASTUNE_URL, or look at the proxy or ingress that stands there"
            )
        if response.status_code in (401, 403):
            raise NotAuthorized(f"the scheduler at {self.url} refused the token: {reason}")
        raise RequestRefused(reason)


def _local_token(url: str) -> str | None:
    folder = default_state_dir()
    server = read_server_file(folder)
    if server is None or server.get("url") != url.rstrip("/"):
        return None
    try:
        return (folder / "token").read_text().strip()
    except OSError:
        return None


def of_folder(folder: Path, *, quick: bool = False) -> SchedulerClient:
    """The scheduler that runs on a state folder."""
    server = read_server_file(folder)
    if server is None:
        raise SchedulerError(
            f"no scheduler has run on {folder}; start one with `elastune up`, set ELASTUNE_URL, or name the folder of "
            "a sweep's own scheduler with --state-dir"
        )
    client = SchedulerClient(server["url"], (folder / "token").read_text().strip(), quick=quick)
    if quick and is_held(folder):
        return client
    try:
        return client.checked()
    except SchedulerUnreachable as error:
        raise NotRunning(
            f"the scheduler of {folder} is not running (it was last at {server['url']}); a sweep's own one ends with "
            "its sweep, another is started with `elastune up --state-dir`",
            folder,
        ) from error


def _checked(client: SchedulerClient) -> SchedulerClient:
    try:
        client.check()
    except BaseException:
        client.close()
        raise
    return client
