"""Client: what the command line can do, from Python.

from scheduler.client import Client

with Client.connect() as client:
    for trial in client.trials(study="alpha", state="running"):
        print(trial.label, trial.score)
    client.pause(client.trial("alpha/3"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from scheduler.client.connection import SchedulerClient, of_folder
from scheduler.client.finding import default_state_dir, named_scheduler
from scheduler.client.rows import Entry, Node, Queue, Study, Trial, UsedHours, row_of
from scheduler.errors import SchedulerError
from trials.plain_words import printable
from trials.record import WaitingJob


class Client:
    """Client of a scheduler's API: lists and steers trials, studies and nodes. Thread-safe.

    A trial is given as a Trial, its id, the beginning of an id, ``STUDY/NUMBER``, or a number that only one trial has;
    a study as its title, its name, or the beginning of one.

    Any call may raise SchedulerUnreachable, NotAuthorized, RequestRefused or SchedulerError.
    """

    def __init__(self, connection: SchedulerClient) -> None:
        self.connection = connection

    @classmethod
    def connect(cls, *, state_dir: str | Path | None = None, scheduler: str = "") -> Client:
        """Connect to the scheduler of ``state_dir``, or to the one that elastune.toml calls ``scheduler``.

        Without either, in this order: ELASTUNE_URL, the default of elastune.toml, this user's scheduler on this
        machine.
        """
        return cls(_connection(None if state_dir is None else Path(state_dir), scheduler))

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self.connection.url

    # ------------------------------------------------------------------ looking

    def trials(self, *, study: str | None = None, state: str | None = None, last: int | None = None) -> list[Trial]:
        """Return trials in order of submission.

        ``state``: one, or ``live``, ``waiting``, ``over``; ``last``: at most so many finished trials, beside all that
        are not finished.
        """
        asked: dict[str, Any] = {"study": study, "state": state, "last": last}
        found = self._get("/rows", **asked)
        return [row_of(Trial, each) for each in found["trials"]]

    def trial(self, wanted: str | Trial) -> Trial:
        if isinstance(wanted, Trial):
            return wanted
        rows: list[dict[str, Any]] = self._get("/rows", trial=wanted)["trials"]
        if len(rows) == 1:
            return row_of(Trial, rows[0])
        if not rows:
            raise SchedulerError(f"no trial is called {wanted!r}; `elastune ls` lists their ids")
        several = ", ".join(printable(row_of(Trial, each).label) for each in rows[:5])
        raise SchedulerError(f"{len(rows)} trials are called {wanted!r}: {several}; use one of these names, or an id")

    def story(self, trial: str | Trial) -> dict[str, Any]:
        """Return all that is kept of a trial as JSON: reports, measurements, history, replicas, last decision."""
        found: dict[str, Any] = self._get(f"/page/trials/{self.trial(trial).id}")
        return found

    def history(self, *, study: str | None = None, most: int = 200, until: float | None = None) -> list[Entry]:
        """Return what happened to all trials, or to a study's, newest first."""
        name = None if study is None else self.study(study).name
        return [row_of(Entry, each) for each in self._get("/page/story", study=name, most=most, until=until)]

    def studies(self) -> list[Study]:
        return [row_of(Study, each) for each in self._get("/rows/studies")]

    def study(self, wanted: str | Study) -> Study:
        if isinstance(wanted, Study):
            return wanted
        all_studies = self.studies()
        matching = [each for each in all_studies if wanted in (each.name, each.title)]
        matching = matching or [
            each for each in all_studies if each.name.startswith(wanted) or each.title.startswith(wanted)
        ]
        if len(matching) != 1:
            names = ", ".join(sorted(each.name for each in matching or all_studies))
            there = f"there are: {printable(names)}" if names else "this scheduler has no study"
            raise SchedulerError(f"{len(matching) or 'no'} studies match {wanted!r}; {there}")
        return matching[0]

    def nodes(self) -> list[Node]:
        return [row_of(Node, each) for each in self._get("/rows/nodes")]

    def queue(self) -> Queue:
        found = self._get("/rows/queue")
        return row_of(Queue, {**found, "jobs": [row_of(WaitingJob, each) for each in found["jobs"]]})

    def usage(self) -> list[UsedHours]:
        """Slot hours by study and day."""
        return [row_of(UsedHours, each) for each in self._get("/page/usage")]

    def logs(self, trial: str | Trial) -> dict[str, str]:
        """Return the output of each of a trial's replicas, the oldest first; of long ones the end."""
        found = self._get(f"/trials/{self.trial(trial).id}/log")
        return {each["replica_id"]: each["words"] for each in found}

    def replicas_with_logs(self, trial: str | Trial) -> list[str]:
        """Ids of those that have printed something, the oldest first."""
        found = self._get(f"/trials/{self.trial(trial).id}/log", most_bytes=0)
        return [each["replica_id"] for each in found]

    def log_since(self, trial: str | Trial, replica: str, after: int = -1) -> tuple[str, int, bool]:
        """Return a replica's output from a byte on, where to go on, and whether its trial is over."""
        found = self._get(f"/trials/{self.trial(trial).id}/log/{quote(replica)}", after=after)
        return found["words"], found["next"], found["over"]

    # ------------------------------------------------------------------ changing

    def submit(self, spec: Mapping[str, Any]) -> Trial:
        """Submit a trial by its specification (trials.spec.TrialSpec as JSON).

        Without a number it gets the next one.
        """
        made = self.connection.request("POST", "/trials", dict(spec))
        return self.trial(made["trial_id"])

    def stop(self, trial: str | Trial, why: str = "stopped by request") -> bool:
        """End a trial; False when it was over already."""
        found = self.trial(trial)
        if found.is_over:
            return False
        self._post(f"/trials/{found.id}/cancel", {"why": why})
        return True

    def pause(self, trial: str | Trial, why: str = "") -> None:
        """Have it save its state and give its slots back, until ``resume``."""
        self._post(f"/trials/{self.trial(trial).id}/pause", {"why": why})

    def resume(self, trial: str | Trial) -> None:
        self._post(f"/trials/{self.trial(trial).id}/resume", {})

    def clone(self, trial: str | Trial, **parameters: Any) -> Trial | None:
        """Run a trial again with these parameters changed; None where its sweep is going to submit it."""
        return self._again(trial, {"parameters": parameters})

    def fork(self, trial: str | Trial, **parameters: Any) -> Trial | None:
        """Start a new trial from a trial's present state, with these parameters changed.

        Returns the new trial, or None where the trial's sweep is going to submit it.
        """
        return self._again(trial, {"parameters": parameters, "forks": True})

    def extend(self, trial: str | Trial, epochs: int) -> Trial | None:
        """Start a new trial from a trial's state, to train ``epochs`` more; None where its sweep will submit it."""
        return self._again(trial, {"more_epochs": epochs, "forks": True})

    def _again(self, trial: str | Trial, body: Mapping[str, Any]) -> Trial | None:
        made = self._post(f"/trials/{self.trial(trial).id}/clone", body)
        return self.trial(made["trial_id"]) if "trial_id" in made else None

    def set_terms(self, study: str | Study, **terms: Any) -> tuple[dict[str, Any], list[str]]:
        """Change a study's terms (trials.terms.StudyTerms); returns all of them, and warnings."""
        answer = self.connection.request("PATCH", f"/studies/{quote(self.study(study).name)}", terms)
        return answer["terms"], answer["warnings"]

    def forget(self, trials: Sequence[str]) -> int:
        """Forget trials that are over, by id, with all that is kept of them; returns how many there were."""
        forgotten: int = self._post("/trials/forget", {"trials": list(trials)})["forgotten"]
        return forgotten

    def token(self, access: Literal["owner", "study", "read"], *, study: str = "", replace: bool = False) -> str:
        token: str = self._post("/tokens", {"access": access, "study": study, "replace": replace})["token"]
        return token

    def page_link(self, *, read: bool = False) -> str:
        """Return an address that opens the web page once."""
        path: str = self._post("/page/links", {"access": "read" if read else "owner"})["path"]
        return f"{self.url}{path}"

    # ------------------------------------------------------------------ requests

    def _get(self, path: str, **asked: Any) -> Any:
        given = {name: value for name, value in asked.items() if value is not None}
        return self.connection.request("GET", path, params=given)

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.connection.request("POST", path, dict(body))


def _connection(state_dir: Path | None, scheduler: str) -> SchedulerClient:
    if state_dir is not None:
        return of_folder(state_dir)
    named = named_scheduler(scheduler) if scheduler else None
    if named is not None:
        return SchedulerClient.of_named(named)
    return SchedulerClient.from_environ() or of_folder(default_state_dir())
