"""Display of a sweep: its page below a cell of a notebook, and the output of its replicas."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from scheduler.client.background import repeating
from scheduler.client.client import Client
from scheduler.client.connection import SchedulerClient
from scheduler.client.rows import Trial
from scheduler.errors import SchedulerError
from trials.plain_words import printable


def page_link(client: SchedulerClient) -> str:
    """Return an address that opens the page once."""
    return f"{client.url}{client.request('POST', '/page/links', {})['path']}"


def in_notebook() -> bool:
    """Tell whether this process shows what it makes in cells, as Jupyter's do."""
    return type(_shell()).__name__ == "ZMQInteractiveShell"


def _shell() -> Any:
    interactive = sys.modules.get("IPython")
    return None if interactive is None else interactive.get_ipython()


FRAME = """<a href={link} target="_blank">open the sweep's page in a tab of its own</a>
<iframe id={name} width="100%" height="{height}" style="border:0"></iframe>
<script>{{
  // Browsers send a page's cookie within a frame only where both are of one host by name.
  const host = location.hostname === "localhost" ? "localhost" : "127.0.0.1";
  document.getElementById({name}).src = {framed}.replace("//127.0.0.1:", `//${{host}}:`);
}}</script>"""


def show_page(client: SchedulerClient, *, height: int = 640) -> None:
    """Show the page below the cell, for a browser on this machine; else a link to the address."""
    from IPython.display import HTML, display

    tab, framed = page_link(client), page_link(client)
    name = f"elastune-{framed[-8:]}"
    html = FRAME.format(link=json.dumps(tab), name=json.dumps(name), framed=json.dumps(framed), height=height)
    display(HTML(html))  # type: ignore[no-untyped-call]  # IPython has no types for them


SECONDS = 0.5


class ShownOutput:
    """Reader for one thread. ``scheduler``: how the driver reaches it at present."""

    def __init__(self, scheduler: Callable[[], SchedulerClient], study: str) -> None:
        self._scheduler = scheduler
        self._study = study
        self._client = self._connected()
        self._places: dict[tuple[str, str], int] = {}
        self._begun: dict[tuple[str, str], str] = {}
        """The beginning of a line of which the rest has not come."""
        self._over = {trial.id for trial in self._trials() if trial.is_over}

    def _connected(self) -> Client:
        found = self._scheduler()
        return Client(SchedulerClient(found.url, found.token))

    def _trials(self) -> Sequence[Trial]:
        if self._client.url != self._scheduler().url:
            self._client.close()
            self._client = self._connected()
        return self._client.trials(study=self._study)

    def look(self) -> Iterator[str]:
        """Lines that have been printed since the last look, each with its trial before it; raises SchedulerError."""
        for trial in self._trials():
            if trial.id in self._over:
                continue
            for replica in self._client.replicas_with_logs(trial):
                key = trial.id, replica
                words, self._places[key], _ = self._client.log_since(trial, replica, self._places.get(key, 0))
                *lines, rest = (self._begun.pop(key, "") + words).split("\n")
                if rest and trial.is_over:
                    lines.append(rest)
                elif rest:
                    self._begun[key] = rest
                yield from (f"[trial {trial.number}] {printable(line)}" for line in lines)
            if trial.is_over:
                self._over.add(trial.id)

    def close(self) -> None:
        self._client.close()


@contextmanager
def showing_output(scheduler: Callable[[], SchedulerClient], study: str) -> Iterator[None]:
    """Print them to standard output until the block ends, and what is left then."""
    shown = ShownOutput(scheduler, study)
    try:
        with repeating(lambda: _print(shown), SECONDS, name="elastune-output"):
            yield
    finally:
        shown.close()


def _print(shown: ShownOutput) -> None:
    # While the scheduler is away nothing is lost: the next look asks for what has been printed since.
    with suppress(SchedulerError):
        for line in shown.look():
            print(line, flush=True)
