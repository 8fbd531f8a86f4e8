"""A scheduler for the replicas of one trial that does as a script says: who trains together, and after whom.

It speaks what replicas hear and nothing else, so that rescales and losses can be tried on the training core alone. A
replica named in ``generations`` joins when its generation has come; one that is not in the next generation is told to
leave, unless it has been lost by then.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dist_core.link.environment import ReplicaEnvironment

LONGEST_WAIT_SECONDS = 5.0


class Director:
    """``generations``: the members of each in turn, by index of the replica. The first forms by itself.

    Of a later one with new members: when these are ready, and anew where it is given up. One that lacks somebody: when
    a replica says that its group is broken, or has asked for ``/leaving``.
    """

    def __init__(self, generations: Sequence[Sequence[int]]) -> None:
        self._script = [tuple(f"trial-{index}" for index in members) for members in generations]
        self._changed = threading.Condition()
        self._published = 0
        self._entered = 0
        self._before: tuple[str, ...] = ()
        """Members of the generation that was left for the published one."""
        self._lost: list[str] = []
        self._epoch: int | None = None
        self._join_epoch: int | None = None
        self._ready: dict[str, int | None] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self.warnings: list[str] = []
        self.reports: list[tuple[int, float]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="director", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # ------------------------------------------------------------------ the script

    def _members(self, number: int) -> tuple[str, ...]:
        return self._script[number - 1] if number > 0 else ()

    def _concerns(self, who: str, after: int) -> bool:
        """Whether there is news for this replica: it is a member, or was one of the generation before."""
        return self._published > after and who in self._members(self._published) + self._before

    def _publish_what_is_due(self) -> None:
        """Called with the lock held."""
        if self._published == self._entered and self._published < len(self._script):
            new = set(self._members(self._published + 1)) - set(self._members(self._published))
            if new and new <= set(self._ready):
                self._publish(new)
        self._changed.notify_all()

    def _publish(self, new: Collection[str] = ()) -> None:
        self._join_epoch = max((self._ready[name] or 0 for name in new), default=0) if self._published and new else None
        self._before = self._members(self._published)
        self._published += 1

    def handle(self, who: str, method: str, path: str, question: dict[str, str], body: Any) -> Any:
        with self._changed:
            answer = getattr(self, f"_{method}_{path.strip('/')}")(who, question, body)
            self._publish_what_is_due()
            return answer

    def _GET_position(self, who: str, question: dict[str, str], body: Any) -> Any:  # noqa: N802  # by method
        if self._script and who in self._script[0]:
            return {"epoch": None}
        # A joiner's code runs while the others train.
        self._changed.wait_for(lambda: self._epoch is not None, 60.0)
        return {"epoch": self._epoch}

    def _POST_ready(self, who: str, question: dict[str, str], body: Any) -> None:  # noqa: N802
        self._ready[who] = body["join_epoch"]

    def _GET_watch(self, who: str, question: dict[str, str], body: Any) -> Any:  # noqa: N802
        after = int(question["after"])
        seconds = min(float(question["wait"]), LONGEST_WAIT_SECONDS)
        if not self._changed.wait_for(lambda: self._concerns(who, after), seconds):
            return {"generation": None}
        members = self._members(self._published)
        return {
            "generation": {
                "number": self._published,
                "members": list(members),
                "nodes": ["here"] * len(members),
                "join_epoch": self._join_epoch,
            },
            "lost": self._lost,
        }

    def _POST_switched(self, who: str, question: dict[str, str], body: Any) -> None:  # noqa: N802
        self._entered = max(self._entered, body["generation"])

    def _POST_broken(self, who: str, question: dict[str, str], body: Any) -> None:  # noqa: N802
        if self._published < len(self._script) and body["generation"] == self._published:
            # As a scheduler tells that sees processes end; not every survivor's collective fails by itself.
            left = set(self._members(self._published + 1))
            self._lost = [name for name in self._members(self._published) if name not in left]
            self._publish()
            self._entered = self._published

    def _POST_leaving(self, who: str, question: dict[str, str], body: Any) -> None:  # noqa: N802
        if self._published < len(self._script):
            self._publish()

    def _POST_frozen(self, who: str, question: dict[str, str], body: Any) -> None:  # noqa: N802
        self._lost = [who]
        self._publish()

    def _POST_epoch(self, who: str, question: dict[str, str], body: Any) -> None:  # noqa: N802
        self._epoch = body["epoch"]

    def _POST_warning(self, who: str, question: dict[str, str], body: Any) -> None:  # noqa: N802
        self.warnings.append(body["message"])

    def _POST_report(self, who: str, question: dict[str, str], body: Any) -> None:  # noqa: N802
        self.reports.append((body["step"], body["value"]))

    def _POST_abandoned(self, who: str, question: dict[str, str], body: Any) -> None:  # noqa: N802
        if body["generation"] == self._published > self._entered:
            # The same ones under the next number, when those who were to join have come to a later epoch.
            self._script.insert(self._published - 1, self._before)
            self._entered, self._epoch = self._published, None
            self._ready.clear()

    def _POST_hints(self, who: str, question: dict[str, str], body: Any) -> None:  # noqa: N802
        pass

    def _PUT_rendezvous(self, who: str, question: dict[str, str], body: Any) -> None:  # noqa: N802
        self._keys[str(body["generation"]), body["key"]] = body["value"]

    def _GET_rendezvous(self, who: str, question: dict[str, str], body: Any) -> Any:  # noqa: N802
        key = (question["generation"], question["key"])
        self._changed.wait_for(lambda: key in self._keys, LONGEST_WAIT_SECONDS)
        return {"value": self._keys.get(key)}


def _handler(director: Director) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _answer(self) -> None:
            split = urlsplit(self.path)
            question = {name: values[0] for name, values in parse_qs(split.query).items()}
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            path = split.path.removeprefix("/replica")
            answer = director.handle(self.headers["X-Elastune-Replica"], self.command, path, question, body)
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _answer  # noqa: N815  # http.server's names

        def handle(self) -> None:
            # A replica that is killed hangs up in the middle of a word.
            with suppress(ConnectionError):
                super().handle()

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


def environment_of(url: str, index: int, folder: Path, *, replicas: int) -> ReplicaEnvironment:
    """Of the replica of that index, as a launcher would write it."""
    return ReplicaEnvironment(
        api_url=url,
        token="t",
        trial_id="trial",
        replica_id=f"trial-{index}",
        launch_index=index,
        checkpoint_dir=folder,
        node="here",
        slot=index,
        replicas=replicas,
    )


@contextmanager
def directing(generations: Sequence[Sequence[int]]) -> Any:
    director = Director(generations)
    try:
        yield director
    finally:
        director.close()
