"""The web page in a real browser: on a sweep that runs and on one that is over, with what can go wrong in between."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scheduler.api.client_side import FOLDER
from scheduler.client import Client
from tests.support.ports import ReservedPort
from tests.support.waiting import until

playwright = pytest.importorskip("playwright.sync_api")

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
ROOT = Path(__file__).parents[3]
AXE = ROOT / "scheduler/dashboard/page/node_modules/axe-core/axe.min.js"
VIEWS = ("slots", "trials", "why", "search", "cluster")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium; on Debian and Ubuntu: apt install chromium"),
    pytest.mark.skipif(not (FOLDER / "index.html").is_file(), reason="the page is not built: make page"),
]


@dataclass
class Scheduler:
    """`elastune up` as a process that can be killed and started again."""

    folder: Path
    port: int
    process: subprocess.Popen[str] | None = None
    link: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "scheduler.cli", "up", "--state-dir", str(self.folder)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), "--emulate", "2x2:resnet50-imagenet@20"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "#code=" in line:
                self.link = line.strip()
                return
        raise AssertionError("the scheduler printed no link")

    def kill(self, with_signal: int = signal.SIGKILL) -> None:
        assert self.process is not None and self.process.stdout is not None
        self.process.send_signal(with_signal)
        self.process.wait(timeout=60)
        self.process.stdout.close()

    def client(self) -> Client:
        return Client.connect(state_dir=self.folder)

    def new_link(self, *, read: bool = False) -> str:
        with self.client() as client:
            return client.page_link(read=read)

    def sweep(self, *names: str, trials: int, epochs: int = 6) -> subprocess.Popen[bytes]:
        token = (self.folder / "token").read_text().strip()
        environ = {**os.environ, "ELASTUNE_URL": self.url, "ELASTUNE_TOKEN": token}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.page_sweep", ",".join(names), str(trials), str(epochs)],
            cwd=ROOT,
            env=environ,
        )


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    port = ReservedPort()
    made = Scheduler(tmp_path_factory.mktemp("state") / "folder", port.number)
    made.start()
    yield made
    made.kill(signal.SIGTERM)
    port.release()


@pytest.fixture(scope="module")
def over(scheduler: Scheduler) -> Scheduler:
    """With two studies whose trials are all over."""
    sweep = scheduler.sweep("alpha", "beta", trials=4)
    assert sweep.wait(timeout=200) == 0
    return scheduler


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        made = running.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield made
        made.close()


@dataclass
class Seen:
    """A page, with what its scripts complained of and what it asked of other machines."""

    page: Any
    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def open(self, view: str) -> None:
        self.page.evaluate("view => { location.hash = '#/' + view }", view)

    def text(self) -> str:
        return str(self.page.inner_text("main"))

    def has(self, words: str, seconds: float = 20.0) -> None:
        # Not an option of a closed list.
        self.page.get_by_text(words).locator("visible=true").first.wait_for(timeout=seconds * 1000)


@pytest.fixture
def seen(browser: Any, over: Scheduler) -> Iterator[Seen]:
    """The page as its owner has it."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, base_url=over.url)
    page = context.new_page()
    made = Seen(page)

    def guard(route: Any) -> None:
        """No network but loopback."""
        if route.request.url.startswith((f"{over.url}/", "data:")):
            route.continue_()
        else:
            made.elsewhere.append(route.request.url)
            route.abort()

    context.route("**/*", guard)
    page.on("pageerror", lambda error: made.errors.append(str(error)))
    page.on(
        "console",
        lambda message: made.errors.append(message.text) if "Content Security Policy" in message.text else None,
    )
    page.goto(over.new_link())
    made.has("live")
    yield made
    context.close()
    assert made.errors == []
    assert made.elsewhere == []


# ---------------------------------------------------------------------- a finished sweep


def test_every_view_shows_a_finished_sweep(seen: Seen) -> None:
    seen.has("trials are over")
    seen.has("best of alpha")
    seen.open("trials")
    seen.has("alpha/0")
    assert seen.page.locator(".table .body .row").count() == 8
    seen.open("why")
    seen.has("What happened, the latest first")
    seen.has("starts on 1 slot")
    seen.open("search")
    seen.has("Parallel coordinates")
    seen.has("best value over slot hours")
    seen.open("cluster")
    seen.page.get_by_role("heading", name="2 nodes").wait_for()
    seen.has("0 of 2")
    assert "4 of 4 over" in seen.text()
    seen.open("trials")
    seen.page.get_by_role("link", name="beta/1", exact=True).click()
    seen.has("Trial beta/1")
    seen.has("goodput (examples/s)")
    seen.has("momentum")
    seen.page.get_by_role("button", name="Log").first.click()
    seen.page.locator(".log").wait_for()


def test_a_slots_pixels_are_the_stores_intervals(seen: Seen, over: Scheduler) -> None:
    seen.page.get_by_role("button", name="All", exact=True).click()
    seen.page.mouse.move(5, 5)
    seen.page.wait_for_timeout(400)
    found = seen.page.evaluate(
        """() => {
            const canvas = document.querySelector('canvas')
            const pen = canvas.getContext('2d')
            const ratio = canvas.width / canvas.getBoundingClientRect().width
            const {from, until, labels, row} = canvas.dataset
            const width = canvas.getBoundingClientRect().width - labels
            const rows = []
            for (let top = 4; top < (canvas.height / ratio) - 22; top += Number(row)) {
                const line = pen.getImageData(labels * ratio, top * ratio, width * ratio, 1).data
                const pixels = []
                for (let x = 0; x < width - 1; x += 1) {
                    const at = Math.round((x + 0.5) * ratio) * 4
                    pixels.push([line[at], line[at + 1], line[at + 2]].join(' '))
                }
                rows.push(pixels)
            }
            return {from: Number(from), until: Number(until), width, rows}
        }"""
    )
    with over.client() as client:
        timeline = client.connection.request("GET", "/timeline")
    places = [(node["name"], slot) for node in timeline["nodes"] for slot in range(node["slots"])]
    assert len(found["rows"]) == len(places)
    idle = "238 240 241"
    wrong: list[Any] = []
    checked = 0
    colors: dict[str, set[str]] = {}
    for place, pixels in zip(places, found["rows"], strict=True):
        mine = [each for each in timeline["intervals"] if (each["node"], each["slot"]) == place]
        for x, color in enumerate(pixels):
            at = found["from"] + (x + 0.5) / found["width"] * (found["until"] - found["from"])
            pixel = (found["until"] - found["from"]) / found["width"]
            # Where a trial has got a slot a line leads to it from its others, over the slots in between.
            edges = [each["began"] for each in timeline["intervals"]] + [each["ended"] for each in mine]
            if any(abs(at - edge) < 1.5 * pixel for edge in edges):
                continue
            holder = next((each["trial_id"] for each in mine if each["began"] <= at < each["ended"]), None)
            checked += 1
            if (holder is None) != (color == idle):
                wrong.append((place, x, at, color, holder))
            elif holder is not None:
                colors.setdefault(holder, set()).add(color)
    assert checked > 1000
    assert wrong == []
    # One colour a trial; lines of resizes and their numbers are drawn in the middle of a bar, not at its top.
    assert all(len(found) == 1 for found in colors.values())
    assert len({min(found) for found in colors.values()}) == len(colors)


def test_trials_are_found_sorted_and_compared(seen: Seen) -> None:
    seen.open("trials")
    seen.has("alpha/0")
    search = seen.page.get_by_placeholder("find:")
    search.fill("beta")
    seen.has("4 trials of 8")
    search.fill("lr>0.9")
    seen.has("0 trials of 8")
    search.fill("")
    seen.page.get_by_role("button", name="value").click()
    values = [float(each) for each in seen.page.locator(".table .body .row > div:nth-child(4)").all_inner_texts()]
    assert values == sorted(values, reverse=True)
    seen.page.get_by_role("button", name="value").click()
    seen.page.wait_for_timeout(300)
    values = [float(each) for each in seen.page.locator(".table .body .row > div:nth-child(4)").all_inner_texts()]
    assert values == sorted(values)
    seen.page.get_by_role("button", name="Compare the first 10").click()
    seen.has("reported values")
    for axis in ("progress", "time"):
        seen.page.get_by_label("over").select_option(axis)
        seen.page.wait_for_timeout(200)
    assert seen.page.locator(".u-over").count() == 1


def test_the_page_reads_well_for_everybody(seen: Seen, over: Scheduler, tmp_path: Path) -> None:
    """A browser opens each view in each theme and width."""
    script = AXE.read_text()
    serious: dict[str, Any] = {}
    with over.client() as client:
        views = [*VIEWS, f"trial/{client.trials()[0].id}"]
    for scheme, width in (("light", 1400), ("dark", 1400), ("light", 400)):
        seen.page.emulate_media(color_scheme=scheme)
        seen.page.set_viewport_size({"width": width, "height": 900})
        for view in views:
            seen.open(view)
            seen.page.wait_for_timeout(700)
            seen.page.evaluate(script)
            found = seen.page.evaluate("async () => (await axe.run()).violations")
            bad = [each["id"] for each in found if each["impact"] in ("serious", "critical")]
            if bad:
                serious[f"{view} {scheme} {width}"] = [
                    (each["id"], [node["html"][:120] for node in each["nodes"][:3]]) for each in found
                ]
            # No part of it lies beside a phone's screen.
            beyond = seen.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert beyond <= 0, f"{view} is {beyond} pixels wider than {width}"
            seen.page.screenshot(path=str(tmp_path / f"{view.partition('/')[0]}-{scheme}-{width}.png"))
    assert serious == {}, json.dumps(serious, indent=1)


def test_it_can_be_used_without_a_mouse(seen: Seen) -> None:
    page = seen.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    canvas = page.locator("canvas")
    canvas.focus()
    before = canvas.get_attribute("data-from"), canvas.get_attribute("data-until")
    page.keyboard.press("+")
    page.wait_for_timeout(300)
    zoomed = canvas.get_attribute("data-from"), canvas.get_attribute("data-until")
    assert float(zoomed[1]) - float(zoomed[0]) < float(before[1]) - float(before[0])
    page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(300)
    assert float(canvas.get_attribute("data-from")) < float(zoomed[0])


# ---------------------------------------------------------------------- a sweep that runs


def test_every_view_follows_a_sweep_that_runs_and_acts_on_it(seen: Seen, over: Scheduler) -> None:
    """The sweep has to run while its views are looked at."""
    sweep = over.sweep("gamma", trials=6, epochs=80)
    try:
        seen.page.locator(".list.training li").first.wait_for(timeout=60_000)
        seen.has("trial trains" if seen.page.get_by_text("trial trains").count() else "trials train")
        seen.open("trials")
        seen.page.get_by_label("State").select_option("live")
        seen.page.locator(".state.running").first.wait_for(timeout=60_000)
        seen.open("cluster")
        seen.has("connected")
        with over.client() as client:
            running = until(lambda: client.trials(state="running"), what="a trial to run")[0]
            seen.open(f"trial/{running.id}")
            seen.has(f"Trial gamma/{running.number}")
            seen.page.get_by_role("button", name="Pause").click()
            until(lambda: client.trial(running.id).state == "paused", what="it to pause")
            seen.has("paused by request: on the page")
            seen.page.get_by_role("button", name="Resume").click()
            until(lambda: client.trial(running.id).state in ("running", "starting"), what="it to go on")
            seen.page.get_by_role("button", name="Clone…").click()
            seen.page.get_by_label("lr").fill("0.0123")
            seen.page.get_by_label("begin with its model and optimizer").check()
            seen.page.get_by_label("epochs beyond its own").fill("200")
            seen.page.get_by_role("button", name="Run it").click()
            seen.has("queued; its sweep runs it next")
            victim = until(
                lambda: [each for each in client.trials(state="running") if each.parameters.get("lr") == 0.0123],
                120.0,
                "the clone to run",
            )[0]
            seen.open(f"trial/{victim.id}")
            seen.has(f"Trial gamma/{victim.number}")
            assert victim.parent == running.id
            tree = seen.page.get_by_role("img", name="A tree of 2 trials over time")
            began_with = f"began with the state of {running.id}"
            until(
                lambda: any(began_with in each for each in tree.locator("title").all_text_contents()), what="the tree"
            )
            seen.page.once("dialog", lambda dialog: dialog.accept())
            seen.page.get_by_role("button", name="Stop").click()
            until(lambda: client.trial(victim.id).is_over, what="it to stop")
            seen.has("stopped on the page")
            seen.open("cluster")
            seen.page.get_by_role("button", name="Change gamma").click()
            seen.page.get_by_label("weight of gamma").fill("3")
            seen.page.get_by_role("button", name="Save").click()
            until(lambda: client.study("gamma").weight == 3.0, what="its weight to change")
            seen.page.get_by_role("button", name="Change gamma").click()
            seen.page.get_by_label("weight of gamma").fill("-1")
            seen.page.get_by_role("button", name="Save").click()
            seen.has("weight is -1")
    finally:
        sweep.terminate()
        sweep.wait(timeout=60)


def test_a_report_is_a_point_on_the_screen_soon(seen: Seen, over: Scheduler) -> None:
    """A browser starts, and a sweep has to report meanwhile."""
    sweep = over.sweep("delta", trials=2, epochs=90)
    try:
        with over.client() as client:
            running = until(lambda: client.trials(study="delta", state="running"), what="a trial to run")[0]
        seen.open(f"trial/{running.id}")
        seen.has("reported value")
        shown = seen.page.locator("[aria-label^='reported value']")

        def points() -> int:
            return int(shown.get_attribute("aria-label").split(", ")[1].split()[0])

        before = until(points, what="a point")
        until(lambda: points() > before + 1, what="more points")
    finally:
        sweep.terminate()
        sweep.wait(timeout=60)


def test_simulating_what_other_policies_would_have_done(seen: Seen) -> None:
    """A browser starts, and a sweep is simulated under each policy."""
    seen.open("cluster")
    seen.page.get_by_role("button", name="Simulate from the record").click()
    seen.page.get_by_text("fair_share").wait_for(timeout=120_000)
    assert seen.page.locator("section[aria-labelledby=what-if] tbody tr").count() == 4
    seen.has("idle although a trial could have used it")


# ---------------------------------------------------------------------- what goes wrong


def test_a_restarted_scheduler_is_found_again(seen: Seen, over: Scheduler) -> None:
    seen.has("trials are over")
    over.kill()
    seen.has("connection lost")
    over.start()
    seen.has("live", 60.0)
    over.kill(signal.SIGTERM)
    seen.has("the scheduler has ended")
    over.start()
    seen.has("live", 60.0)
    with over.client() as client:
        client.connection.request("PUT", "/studies/afterwards", {"owner": "me"})
    seen.open("cluster")
    seen.has("afterwards")


def test_without_a_network_it_says_so_and_goes_on_later(seen: Seen, over: Scheduler) -> None:
    context = seen.page.context
    context.set_offline(True)
    # A stream that is open stays open in the browser's eyes: what asks anew is refused.
    seen.open("why")
    seen.has("the scheduler does not answer")
    context.set_offline(False)
    seen.has("What happened, the latest first")
    until(lambda: seen.page.get_by_text("the scheduler does not answer").count() == 0, what="it to go on")


def test_a_link_opens_once_and_a_token_does_as_well(browser: Any, over: Scheduler) -> None:
    link = over.new_link()
    first, second = browser.new_context(), browser.new_context()
    page = first.new_page()
    page.goto(link)
    page.get_by_text("live", exact=True).wait_for()
    assert "code" not in page.url
    late = second.new_page()
    late.goto(link)
    late.get_by_text("link was used already").wait_for()
    late.get_by_label("Token").fill("wrong")
    late.get_by_role("button", name="Open").click()
    late.get_by_text("the token is not this scheduler's").wait_for()
    late.get_by_label("Token").fill((over.folder / "token").read_text())
    late.get_by_role("button", name="Open").click()
    late.get_by_text("live", exact=True).wait_for()
    late.get_by_role("button", name="Sign out").click()
    late.get_by_label("Token").wait_for()
    first.close()
    second.close()


def test_who_only_reads_finds_no_buttons(browser: Any, over: Scheduler) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(over.new_link(read=True))
    page.get_by_text("read-only").wait_for()
    page.evaluate("location.hash = '#/cluster'")
    page.get_by_role("heading", name="2 nodes").wait_for()
    assert page.get_by_role("button", name="Change").count() == 0
    page.evaluate("location.hash = '#/trials'")
    page.get_by_label("choose alpha/0").check()
    page.get_by_text("Learning curves").wait_for()
    assert page.get_by_role("button", name="Stop").count() == 0
    context.close()


def test_a_replaced_token_ends_its_pages(browser: Any, over: Scheduler) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(over.new_link())
    page.get_by_text("live", exact=True).wait_for()
    with over.client() as client:
        token = client.token("owner", replace=True)
    assert (over.folder / "token").read_text().strip() == token
    # What happens next is not told to the page that is open.
    with over.client() as client:
        client.connection.request("PUT", "/studies/secret", {"owner": "me"})
    page.get_by_label("Token").wait_for()
    assert "secret" not in page.inner_text("body")
    context.close()


def test_what_a_trial_says_is_shown_and_not_obeyed(seen: Seen, over: Scheduler) -> None:
    hostile = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    with over.client() as client:
        trial = client.submit(
            {
                "study": "hostile",
                "entrypoint": "tuner_bridge.in_replica.commands:run",
                "payload": {"command": [sys.executable, "-c", "raise SystemExit(1)", f"--name={hostile}"]},
                "driven": False,
                "max_losses": 0,
            }
        )
        seen.open("trials")
        seen.page.get_by_placeholder("find:").fill("hostile")
        seen.has(hostile[:20])
        until(lambda: client.trial(trial.id).is_over, what="it to fail")
    seen.open(f"trial/{trial.id}")
    seen.has("failed")
    assert "owned" not in seen.page.title()


def test_a_finished_sweep_is_looked_at_without_its_scheduler(browser: Any, over: Scheduler) -> None:
    over.kill(signal.SIGTERM)
    command = [sys.executable, "-u", "-m", "scheduler.cli", "page", "--state-dir", str(over.folder)]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        link = serving.stdout.readline().strip()
        context = browser.new_context()
        page = context.new_page()
        page.goto(link)
        page.get_by_text("trials are over").wait_for()
        page.get_by_text("read-only").wait_for()
        page.evaluate("location.hash = '#/search'")
        page.get_by_text("Parallel coordinates").first.wait_for()
        context.close()
    finally:
        serving.send_signal(signal.SIGINT)
        serving.communicate(timeout=30)
        assert serving.returncode == 130
        over.start()
