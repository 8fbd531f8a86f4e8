from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scheduler.client.rows import Trial
from scheduler.dashboard.colors import trial_color
from scheduler.dashboard.lines import WIDE, Column, duration, table
from scheduler.dashboard.listings import print_trial, print_trials, print_why
from scheduler.dashboard.picture import bars, draw_timeline
from scheduler.dashboard.terminal import sweep_view


def timeline() -> dict[str, Any]:
    def trial(trial_id: str, number: int) -> dict[str, Any]:
        return {"trial_id": trial_id, "number": number, "state": "running", "reason": {"code": "c", "sentence": "why"}}

    def interval(trial_id: str, slot: int, began: float, ended: float | None) -> dict[str, Any]:
        return {"node": "n", "slot": slot, "trial_id": trial_id, "replica_id": "r", "began": began, "ended": ended}

    return {
        "now": 110.0,
        "nodes": [{"name": "n", "slots": 2}],
        "trials": [trial("a", 0), trial("b", 1)],
        "intervals": [interval("a", 0, 100.0, 105.0), interval("b", 0, 105.0, None), interval("a", 1, 101.0, 104.0)],
    }


def test_bars_start_at_zero_and_reach_to_now() -> None:
    rows, drawn = bars(timeline())
    assert rows == ["n / 0", "n / 1"]
    assert [(bar.label, bar.began, bar.ended) for bar in drawn] == [
        ("0", 0.0, 5.0),
        ("1", 5.0, 10.0),
        ("0", 1.0, 4.0),
    ]


def test_two_studies_are_told_apart_by_name_and_colour() -> None:
    told = timeline()
    for trial, study in zip(told["trials"], ("alpha-1", "beta-2"), strict=True):
        trial |= {"study": study, "number": 0}
    told["studies"] = [{"name": "alpha-1", "title": "alpha"}, {"name": "beta-2", "title": ""}]
    _, drawn = bars(told)
    assert {bar.label for bar in drawn} == {"alpha/0", "beta-2/0"}
    assert len({bar.color for bar in drawn}) == 2
    overview = {
        "nodes": [{"name": "n", "slots": 4}],
        "held_slots": 2,
        "studies": told["studies"],
        "trials": [{**trial, "replicas": 1, "max_replicas": 1, "slots": 1} for trial in told["trials"]],
        "changes": [{"at": 1.0, "trial_id": "b", "what": "1 -> 2 replicas", "reason": {"sentence": "from a"}}],
    }
    console = Console(width=140, record=True)
    console.print(sweep_view(overview))
    text = console.export_text()
    assert "trial beta-2/0 1 -> 2 replicas from trial alpha/0" in text
    assert "2 of 4 in use" in text


def test_slots_that_others_hold_do_not_look_free() -> None:
    trial = {
        "trial_id": "a",
        "number": 0,
        "study": "s",
        "state": "running",
        "replicas": 1,
        "max_replicas": 1,
        "slots": 1,
    }
    console = Console(width=140, record=True)
    console.print(sweep_view({"nodes": [{"name": "n", "slots": 4}], "held_slots": 3, "trials": [trial]}, title="mine"))
    text = console.export_text()
    assert "1 of 4 in use, 2 by others" in text
    assert text.count("□") == 1


def test_the_picture_is_written_into_a_new_folder(tmp_path: Path) -> None:
    png = draw_timeline(timeline(), tmp_path / "new" / "slots")
    assert png.read_bytes().startswith(b"\x89PNG")
    empty = {"now": 0.0, "nodes": [{"name": "n", "slots": 1}], "trials": [], "intervals": []}
    assert draw_timeline(empty, tmp_path / "empty").exists()


def test_colours_differ_between_neighbours() -> None:
    assert len({trial_color(number) for number in range(16)}) == 16


def test_the_live_view_shows_what_runs_and_why() -> None:
    overview = {
        "now": 1.0,
        "nodes": [{"name": "n", "slots": 4}],
        "studies": [],
        "trials": [
            {
                "trial_id": "tx",
                "number": 3,
                "state": "running",
                "replicas": 2,
                "max_replicas": 4,
                "slots": 2,
                "batch": 64,
                "goodput": 1234.5,
                "promise": 0.75,
                "share_done": 0.5,
                "latest": {"step": 7, "value": 0.98},
            },
            {"trial_id": "tz", "number": 4, "state": "pending", "replicas": 0, "max_replicas": 4, "slots": 0},
        ],
        "changes": [
            {
                "at": 0.5,
                "trial_id": "tx",
                "what": "1 -> 2 replicas",
                "reason": {"code": "c", "sentence": "took from ty"},
            }
        ],
        "over": {"": {"pruned": 1}},
        "named": [{"trial_id": "ty", "number": 1}],
    }
    console = Console(width=120, record=True)
    console.print(sweep_view(overview, title="digits", total=16))
    text = console.export_text()
    for words in (
        "1/16 trials, 1 pruned",
        "2 of 4 in use",
        "2/4",
        "1234",
        "0.75",
        "0.9800",
        "50%",
        "took from trial 1",
    ):
        assert words in text


HOSTILE = "cannot read [/data/train.csv] \x1b]0;title\x07\x1b[31m[red]x[/red]\nforged"


def hostile_trial() -> dict[str, Any]:
    return {
        "trial_id": "t[b]x",
        "study": "s[/b]",
        "number": 0,
        "state": "failed",
        "replicas": 0,
        "max_replicas": 1,
        "reason": {"code": "user_exception", "sentence": HOSTILE},
        "outcome": {"traceback": f"Traceback:\n  {HOSTILE}"},
        "history": [{"at": 1.0, "who": "trial", "what": "[/i]", "reason": {"code": "c", "sentence": HOSTILE}}],
        "held_slots": 0,
    }


@pytest.mark.parametrize("command", ["ls", "show", "why", "top"])
def test_brackets_and_escapes_of_one_trial_break_nobodys_view(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    trial = hostile_trial()
    change = {"at": 1.0, "trial_id": "t[b]x", "what": "[/i]", "reason": {"code": "c", "sentence": HOSTILE}}
    if command == "ls":
        row = Trial(
            id=trial["trial_id"],
            study=trial["study"],
            number=0,
            state="failed",
            code="user_exception",
            why=HOSTILE,
            replicas=0,
            min=1,
            max=1,
            submitted=0.0,
            finished=1.0,
        )
        print_trials([row], 1.0)
    elif command == "show":
        replica = {"replica_id": "r[/b]", "node": "n[x]", "slot": 0, "state": "gone", "pid": 1, "exit_status": 1}
        print_trial({**trial, "replicas": [replica]})
    elif command == "why":
        print_why({"trial": trial, "grant": None, "held_slots": 0, "policy_error": None, "changes": [change]})
    else:
        nodes = [{"name": "n", "slots": 1}]
        Console(width=WIDE).print(sweep_view({"trials": [trial], "nodes": nodes, "changes": [change]}, title="[/b]"))
    shown = capsys.readouterr().out
    assert "[/data/train.csv]" in shown
    assert "[red]x[/red]" in shown
    assert "\x1b" not in shown and "\x07" not in shown
    assert not any(line.startswith("forged") for line in shown.splitlines())


def test_a_table_is_as_wide_as_it_needs_and_cut_at_the_terminal() -> None:
    columns: list[Column[tuple[str, float | None]]] = [
        Column("name", lambda row: row[0]),
        Column("value", lambda row: row[1], right=True, color=lambda _: "31"),
        Column("why", lambda row: "because " * 5),
    ]
    rows: list[tuple[str, float | None]] = [("a", 0.123456), ("日本", None)]
    lines = table(columns, rows, width=40).splitlines()
    assert lines[0] == "name   value  why"
    assert lines[1].startswith("a     0.1235  because")
    assert lines[2].startswith("日本       -  because")
    assert all(line.endswith("…") for line in lines[1:])
    assert "\x1b[31m0.1235\x1b[0m" in table(columns, rows, colored=True)
    assert [duration(seconds) for seconds in (5, 119, 600, 9000, 200000)] == [
        "5 s",
        "119 s",
        "10 min",
        "2.5 h",
        "2.3 d",
    ]
