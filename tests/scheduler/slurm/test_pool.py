"""A pool of jobs, with a queue and a clock of the test's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import SchedulerError
from scheduler.policy import policy_by_name
from scheduler.slurm import pool as pool_module
from scheduler.slurm.pool import RENAME_SECONDS, Pool, UsedHours, job_name
from scheduler.slurm.pool_settings import PoolSettings, pool_settings, time_limit
from scheduler.slurm.pool_size import PoolState, expected_wait, plan_pool, price_of_waiting
from scheduler.snapshot import Snapshot
from tests.support.views import model, running, snapshot, waiting
from trials.agents.roster import Roster
from trials.agents.words import AgentReplica, AgentSlot, News, Phase
from trials.errors import SlurmRefused, SlurmUnreachable
from trials.slurm.jobs import QueuedJob, log_name, parse_jobs

GROWS = PoolSettings(options={"partition": "scavenge"}, most_slots=8)


@dataclass
class FakeQueue:
    """Jobs begin when the test says so."""

    submitted: list[int] = field(default_factory=list)
    present: dict[str, QueuedJob] = field(default_factory=dict)
    asked: int = 0
    refuses: Exception | None = None
    renamed: list[tuple[tuple[str, ...], str]] = field(default_factory=list)

    def rename(self, jobs: Sequence[str], name: str) -> None:
        self.renamed.append((tuple(jobs), name))

    def submit(self, count: int, name: str) -> str:
        if self.refuses is not None:
            raise self.refuses
        self.submitted.append(count)
        job = str(len(self.submitted))
        for index in range(count):
            each = f"{job}_{index}" if count > 1 else job
            self.present[each] = QueuedJob(
                job=each,
                waits=True,
                submitted_at=0.0,
                starts_at=None,
                nodes="",
                pool="scavenge",
                reason="Resources",
            )
        return job

    def jobs(self) -> list[QueuedJob]:
        self.asked += 1
        if isinstance(self.refuses, SlurmUnreachable):
            raise self.refuses
        return list(self.present.values())

    def cancel(self, jobs: Sequence[str], *, only_waiting: bool = False) -> None:
        for job in jobs:
            if job in self.present and (self.present[job].waits or not only_waiting):
                del self.present[job]

    def begin(self, job: str, at: float = 60.0) -> None:
        self.present[job] = replace(self.present[job], waits=False, starts_at=at, nodes="n1", reason="")


class Rig:
    def __init__(self, folder: Path, described: PoolSettings = GROWS) -> None:
        self.now = 0.0
        self.queue = FakeQueue()
        self.roster = Roster(monotonic=lambda: self.now)
        self.folder = folder
        self.pool = Pool(
            self.queue,
            described,
            self.roster,
            UsedHours(folder / "pool.json"),
            logs=folder,
            clock=lambda: self.now,
            label_of=lambda replica_id: f"my study/{replica_id.partition('-')[0]}",
        )
        self.versions: dict[str, int] = {}

    def call(self, job: str, replicas: Sequence[str] = (), leaves: str = "") -> None:
        """The job's agent calls."""
        self.versions[job] = self.versions.get(job, 0) + 1
        self.roster.hear(
            News(
                agent=f"agent-{job}",
                host="n1",
                version=self.versions[job],
                job=job,
                slots=(AgentSlot(),),
                replicas={name: AgentReplica(phase=Phase.RUNNING, pid=1) for name in replicas},
                leaves=leaves,
            )
        )

    def look(self, seen: Snapshot | None, seconds: float = 0.5) -> None:
        self.now += seconds
        self.pool.look(seen, self.now)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


NOTHING = Snapshot(now=0.0, nodes=(), trials=())


def test_jobs_are_asked_for_as_trials_wait_all_by_one_call(rig: Rig) -> None:
    rig.look(Snapshot(now=0.0, nodes=(), trials=tuple(waiting(f"t{index}") for index in range(5))))
    assert rig.queue.submitted == [5]
    for _ in range(20):
        rig.look(Snapshot(now=0.0, nodes=(), trials=tuple(waiting(f"t{index}") for index in range(5))))
    assert rig.queue.submitted == [5], "what was asked for is not asked for again"


def test_a_job_that_nobody_uses_is_given_back_and_one_that_is_used_is_not(rig: Rig) -> None:
    rig.look(Snapshot(now=0.0, nodes=(), trials=(waiting("a"), waiting("b"))))
    for job in ("1_0", "1_1"):
        rig.queue.begin(job)
    rig.call("1_0", ["r"])
    rig.call("1_1")
    held = running("a", placement={"n1": 1}, max_slots=1)
    for _ in range(200):
        rig.look(snapshot(held, slots=2))
        rig.call("1_0", ["r"])
        rig.call("1_1")
    assert rig.roster.orders("agent-1_0").end == ""
    assert rig.roster.orders("agent-1_1").end == "nobody needs its slots"


def test_jobs_that_wait_are_taken_back_when_nobody_wants_them_for_a_while(rig: Rig) -> None:
    rig.look(Snapshot(now=0.0, nodes=(), trials=(waiting("a"), waiting("b"))))
    rig.look(NOTHING)
    assert len(rig.queue.present) == 2, "the next trial may come in a moment"
    rig.look(NOTHING, pool_module.PATIENCE_SECONDS)
    assert rig.queue.present == {}


def test_the_queue_is_asked_at_most_once_in_two_seconds_and_seldom_when_all_is_calm(rig: Rig) -> None:
    demand = Snapshot(now=0.0, nodes=(), trials=tuple(waiting(f"t{index}") for index in range(8)))
    for _ in range(120):
        rig.look(demand)
    assert rig.queue.asked <= 60.0 / pool_module.LEAST_POLL_SECONDS
    for job in list(rig.queue.present):
        rig.queue.begin(job)
    rig.look(demand, 10.0)
    before = rig.queue.asked
    for second in range(600):
        for job in rig.queue.present:
            rig.call(job, [f"r{job}"])
        rig.look(demand, 1.0)
        if second == 60:
            before = rig.queue.asked
    assert rig.queue.asked - before <= 540.0 / pool_module.CALM_POLL_SECONDS + 1


def test_an_agent_whose_job_is_gone_from_the_queue_is_gone(rig: Rig) -> None:
    rig.look(Snapshot(now=0.0, nodes=(), trials=(waiting("a"),)))
    rig.queue.begin("1")
    rig.call("1", ["r"])
    rig.look(NOTHING, 3.0)
    del rig.queue.present["1"]
    rig.call("1", ["r"])
    rig.look(NOTHING, 3.0)
    assert len(rig.roster.agents()) == 1, "one that calls is there, whatever the queue shows"
    for _ in range(10):
        rig.look(NOTHING, 3.0)
    assert rig.roster.agents() == []
    state = rig.roster.state_of("r")
    assert str(getattr(state, "why", "")).startswith("job 1 on n1 is gone: it is no longer in the queue")


def test_a_job_that_ends_before_its_agent_calls_makes_the_pool_rest_and_say_why(rig: Rig) -> None:
    demand = Snapshot(now=0.0, nodes=(), trials=(waiting("a"),))
    for number in range(1, 9):
        (rig.folder / log_name(str(number))).write_text("/bin/bash: /opt/env/bin/python: No such file or directory\n")
    for _ in range(600):
        rig.look(demand)
        for job in list(rig.queue.present):
            if rig.queue.present[job].waits:
                rig.queue.begin(job)
            else:
                del rig.queue.present[job]
    assert 2 <= len(rig.queue.submitted) <= 7, "later and later"
    (queued,) = rig.pool.queued()
    last = len(rig.queue.submitted)
    said = "/bin/bash: /opt/env/bin/python: No such file or directory"
    assert queued.trouble == f"job {last} ended before its agent contacted the scheduler: {said}"
    assert (rig.folder / log_name("12_3")).name == "12.3.log"
    rig.queue.submitted.clear()
    rig.call("7", ["r"])
    rig.look(demand, 1000.0)
    assert rig.pool.trouble == ""


def test_words_of_a_refusal_reach_those_who_wait_and_it_is_tried_again(rig: Rig) -> None:
    demand = Snapshot(now=0.0, nodes=(), trials=(waiting("a"),))
    rig.queue.refuses = SlurmRefused("sbatch: QOSMaxSubmitJobPerUserLimit")
    rig.look(demand)
    (queued,) = rig.pool.queued()
    seen = replace(demand, queued=rig.pool.queued())
    reason = policy_by_name("goodput").allocate(seen)["a"].reason
    assert queued.slots == 0
    assert (reason.code, reason.sentence) == (
        "queued",
        "needs 1 slot; Slurm refuses more jobs: sbatch: QOSMaxSubmitJobPerUserLimit",
    )
    rig.queue.refuses = None
    rig.look(demand, 10.0)
    assert rig.queue.submitted == [1]


def test_a_limit_that_refuses_many_at_once_lets_fewer_pass(rig: Rig) -> None:
    demand = Snapshot(now=0.0, nodes=(), trials=tuple(waiting(f"t{index}") for index in range(8)))
    submit = rig.queue.submit

    def limited(count: int, name: str) -> str:
        if count + len(rig.queue.present) > 5:
            raise SlurmRefused("sbatch: QOSMaxSubmitJobPerUserLimit")
        return submit(count, name)

    rig.queue.submit = limited  # type: ignore[method-assign]
    for _ in range(100):
        rig.look(demand)
    assert len(rig.queue.present) == 5
    assert "QOSMaxSubmitJobPerUserLimit" in rig.pool.trouble


def test_nothing_is_asked_for_before_the_queue_has_told_what_there_is(rig: Rig) -> None:
    demand = Snapshot(now=0.0, nodes=(), trials=(waiting("a"),))
    asked = rig.queue.jobs

    def refuses() -> list[QueuedJob]:
        raise SlurmRefused("squeue: error: munge is away")

    rig.queue.jobs = refuses  # type: ignore[method-assign]
    for _ in range(30):
        rig.look(demand)
    assert rig.queue.submitted == [] and "munge is away" in rig.pool.trouble
    rig.queue.jobs = asked  # type: ignore[method-assign]
    for _ in range(10):
        rig.look(demand)
    assert rig.queue.submitted == [1] and rig.pool.trouble == ""


def test_a_job_that_runs_without_an_agent_that_calls_is_taken_back(rig: Rig) -> None:
    demand = Snapshot(now=0.0, nodes=(), trials=(waiting("a"),))
    rig.look(demand)
    rig.queue.begin("1")
    for _ in range(100):
        rig.look(demand, pool_module.AGENT_SECONDS / 50.0)
    assert "1" not in rig.queue.present
    assert "ran for 300 s, but its agent did not contact the scheduler" in rig.pool.trouble


def test_a_job_that_ends_or_is_held_up_is_no_slot_and_its_agent_may_finish(rig: Rig) -> None:
    demand = Snapshot(now=0.0, nodes=(), trials=(waiting("a"),))
    rig.look(demand)
    rig.queue.begin("1")
    rig.call("1", ["r"])
    rig.queue.present["1"] = replace(rig.queue.present["1"], is_over=True)
    rig.call("1", ["r"], leaves="its job is being ended")
    for _ in range(10):
        rig.call("1", ["r"], leaves="its job is being ended")
        rig.look(demand, 1.0)
    assert len(rig.roster.agents()) == 1, "its replicas still save"
    assert rig.queue.submitted == [1, 1], "another one is asked for meanwhile"


def test_of_jobs_whose_size_nobody_knows_one_is_asked_for_first(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(GROWS, slots_per_job=0))
    demand = Snapshot(now=0.0, nodes=(), trials=tuple(waiting(f"t{index}") for index in range(8)))
    for _ in range(20):
        rig.look(demand)
    assert rig.queue.submitted == [1]
    rig.queue.begin("1")
    rig.call("1", ["r"])
    for _ in range(20):
        rig.call("1", ["r"])
        rig.look(demand)
    assert sum(rig.queue.submitted) == 8


def test_a_controller_that_does_not_answer_costs_no_job_and_is_asked_patiently(rig: Rig) -> None:
    demand = Snapshot(now=0.0, nodes=(), trials=(waiting("a"),))
    rig.look(demand)
    rig.queue.begin("1")
    rig.call("1", ["r"])
    rig.look(demand, 3.0)
    rig.queue.refuses = SlurmUnreachable("squeue: Unable to contact slurm controller")
    before = rig.queue.asked
    for _ in range(60):
        rig.call("1", ["r"])
        rig.look(demand, 1.0)
    assert rig.queue.asked - before <= 60.0 / pool_module.LEAST_POLL_SECONDS
    assert [news.job for news in rig.roster.agents()] == ["1"]


def test_those_who_wait_hear_how_many_slots_are_queued_and_when_they_come(rig: Rig) -> None:
    demand = Snapshot(now=0.0, nodes=(), trials=tuple(waiting(f"t{index}", min_slots=4) for index in range(2)))
    rig.look(demand)
    rig.look(demand, 3.0)
    rig.queue.present = {name: replace(job, starts_at=rig.now + 12 * 60 + 3) for name, job in rig.queue.present.items()}
    rig.look(demand, 3.0)
    reason = policy_by_name("goodput").allocate(replace(demand, queued=rig.pool.queued()))["t0"].reason
    assert reason.code == "queued"
    assert reason.sentence == (
        "needs 4 slots; 4 of its slots are queued in scavenge, expected in 12 min; "
        "the pool's limit is reached: slots=0:8"
    )


def test_slot_hours_end_the_pool_and_outlast_the_scheduler(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(GROWS, hours=1.0))
    rig.look(Snapshot(now=0.0, nodes=(), trials=(waiting("a"),)))
    rig.queue.begin("1")
    held = snapshot(running("a", placement={"n1": 1}, max_slots=1), slots=1)
    for _ in range(40):
        rig.call("1", ["r"])
        rig.look(held, 60.0)
    assert not rig.roster.orders("agent-1").end
    rig.pool._used.save()
    assert 0.6 < json.loads((tmp_path / "pool.json").read_text())["slot_seconds"] / 3600.0 < 0.7
    again = Rig(tmp_path, replace(GROWS, hours=1.0))
    again.queue.present, again.now = rig.queue.present, rig.now
    for _ in range(30):
        again.call("1", ["r"])
        again.look(held, 60.0)
    assert again.roster.orders("agent-1").end
    assert again.pool.limited_by == "its 1 slot hours are used up"


def test_no_more_slots_are_asked_for_within_an_hour_than_the_user_allows(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(GROWS, per_hour=5))
    demand = Snapshot(now=0.0, nodes=(), trials=tuple(waiting(f"t{index}") for index in range(8)))
    for _ in range(3300):
        rig.look(demand, 1.0)
    assert sum(rig.queue.submitted) == 5
    for _ in range(400):
        rig.look(demand, 1.0)
    assert sum(rig.queue.submitted) == 8


def test_a_job_that_would_come_when_all_is_over_is_not_asked_for() -> None:
    scales = model(overhead=0.001, var=5e3, seen=16)
    view = running(
        "a", model=scales, max_slots=8, placement={"n0": 1}, remaining_progress=60.0 * float(scales.goodput(1, 1)[0])
    )
    seen = snapshot(view, slots=1)
    at_once, late = (
        plan_pool(seen, GROWS, PoolState(running=("1",), waits_seconds=seconds)).submit for seconds in (0.0, 300.0)
    )
    assert at_once > 0 and late == 0
    assert price_of_waiting(seen, 30.0) == pytest.approx(2.0, rel=1e-3)
    assert price_of_waiting(snapshot(view, waiting("b"), slots=1), 300.0) == 1.0, "one that has nothing waits anyway"
    assert expected_wait([]) == 0.0 and expected_wait([5.0, 1.0, 9.0]) == 5.0


@settings(max_examples=60)
@given(
    waits=st.integers(0, 6),
    runs=st.integers(0, 6),
    idle=st.integers(0, 6),
    trials=st.integers(0, 12),
    most=st.integers(1, 12),
    size=st.integers(1, 4),
)
def test_a_plan_stays_within_the_limits(waits: int, runs: int, idle: int, trials: int, most: int, size: int) -> None:
    state = PoolState(
        waiting=tuple(f"w{index}" for index in range(waits)),
        running=tuple(f"r{index}" for index in range(runs)),
        idle=tuple(f"r{index}" for index in range(min(idle, runs))),
        slots_per_job=size,
    )
    seen = Snapshot(now=0.0, nodes=(), trials=tuple(waiting(f"t{index}") for index in range(trials)))
    plan = plan_pool(seen, replace(GROWS, most_slots=most), state)
    assert plan.submit == 0 or not (plan.take_back or plan.give_back)
    assert set(plan.take_back) <= set(state.waiting) and set(plan.give_back) <= set(state.idle)
    if plan.submit:
        assert (waits + runs + plan.submit) * size <= max(most, size)
    if trials == 0:
        assert plan.submit == 0 and set(plan.take_back) == set(state.waiting)


def test_jobs_are_named_after_the_study_that_they_are_for() -> None:
    assert job_name(snapshot(waiting("a", study="ns.x", study_title="LoRA, small"))) == "elastune-LoRA-small"
    assert job_name(snapshot(waiting("a"), waiting("b", study="other"))) == "elastune"


def test_jobs_that_run_are_named_after_their_trials_now_and_then(rig: Rig) -> None:
    demand = Snapshot(now=0.0, nodes=(), trials=(waiting("a"), waiting("b")))
    rig.look(demand)
    for job in ("1_0", "1_1"):
        rig.queue.begin(job)
    for second in range(int(3 * RENAME_SECONDS)):
        rig.call("1_0", ["3-a"])
        rig.call("1_1", ["3-b"] if second < RENAME_SECONDS + 5 else ["4-a"])
        rig.look(demand, 1.0)
    assert rig.queue.renamed == [(("1_0", "1_1"), "elastune-my-study-3"), (("1_1",), "elastune-my-study-4")]


def test_what_squeue_prints_is_read() -> None:
    listed = (
        "12_0|PENDING|2026-11-25T22:42:06|2026-11-25T22:40:00||scavenge|elastune x|Resources\n"
        "12_1|RUNNING|2026-11-25T22:41:00|2026-11-25T22:40:00|n1|scavenge|elastune x|None\n"
        "12_2|COMPLETING|2026-11-25T22:41:00|2026-11-25T22:40:00|n1|scavenge|elastune x|None\n"
        "16|PENDING|N/A|2026-11-25T22:40:00||main|elastune x|JobHeldUser\n"
        "19|PENDING|2027-11-25T22:42:06|2026-11-25T22:40:00||scavenge|elastune x|Resources\n"
        "17|RUNNING|2026-11-25T22:41:00|2026-11-25T22:40:00|n1|main|mine|None\n"
        "18|PENDING|N/A|2026-11-25T22:40:00||main|elastune x|(Nodes required for job are DOWN|DRAINED)\n"
    )
    first, second, ends, held, far, odd = parse_jobs(listed, "elastune x")
    assert far.waits and far.starts_at is None, "that is what Slurm says of jobs behind one without a time limit"
    assert ends.is_over and not second.is_over
    assert (first.job, first.waits, first.reason) == ("12_0", True, "Resources")
    assert first.starts_at is not None and first.starts_at - first.submitted_at == 126.0
    assert (second.waits, second.nodes, second.reason) == (False, "n1", "")
    assert held.is_held and held.starts_at is None
    assert odd.reason == "(Nodes required for job are DOWN|DRAINED)"


def test_the_users_line_is_sbatchs_options_and_a_few_of_ours() -> None:
    found = pool_settings(
        "partition=gpu account=x gres=gpu:a100:4 exclusive slots=2:32 hours=100 idle=30", gpus_per_slot=2
    )
    assert found.options == {"partition": "gpu", "account": "x", "gres": "gpu:a100:4", "exclusive": None}
    assert (found.least_slots, found.most_slots, found.slots_per_job, found.hours) == (2, 32, 2, 100.0)
    words = found.sbatch_options("/logs")
    assert {"--partition=gpu", "--exclusive", "--no-requeue", "--signal=B:USR1@120", "--nodes=1"} <= set(words)
    assert "--no-requeue" not in pool_settings("requeue").sbatch_options("/logs")
    assert pool_settings("").options == {"gpus": "1"}
    assert pool_settings("cpus-per-task=4").slots_per_job == 4
    assert pool_settings("gpus=1", slots_per_gpu=3).slots_per_job == 3
    assert pool_settings("container-image=img.sqsh container-mount-home").container == (
        "--container-image=img.sqsh",
        "--container-mount-home",
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("UNLIMITED", None),
        (None, None),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str | None, seconds: float | None) -> None:
    assert time_limit(text) == seconds


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-p gpu", "it takes sbatch's long options"),
        ("partition='gpu", "No closing quotation"),
        ("slots=many", "slots=many; it must be MIN:MAX"),
        ("slots=9:4", "slots=9:4; it must be MIN:MAX"),
        ("hours=ten", "hours=ten; it must be a number"),
        ("array=0-9", "leave it out; the scheduler submits jobs when trials can use them"),
        ("nodes=4", "leave it out; each job runs on one node"),
        ("time=2", "jobs would do no work. Raise time, or lower warn=120"),
        ("wait", "leave it out; the scheduler waits for its jobs itself"),
    ],
)
def test_a_line_that_means_nothing_is_refused_with_what_to_write(line: str, words: str) -> None:
    with pytest.raises(SchedulerError) as raised:
        pool_settings(line)
    assert words in str(raised.value)
    with pytest.raises(SchedulerError, match="ask for more GPUs per job"):
        pool_settings("gpus=1", gpus_per_slot=2)
