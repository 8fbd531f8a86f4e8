"""Random training scripts end with the weights of plain PyTorch, or are refused by name: never silently otherwise."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.habits import GROWN, KILL_AT, RESCALED, as_trial, in_plain_pytorch
from tests.support.programs import EPOCHS, LAYERS, OPTIMIZERS, SCHEDULES, Program

PROGRAMS = int(os.environ.get("ELASTUNE_PROGRAMS", "30"))
REFUSED = ("dist_core.errors.InvalidTraining: ", "dist_core.errors.BatchLeftOut: ")
flags = st.booleans()
layer_changes = st.one_of(st.none(), st.tuples(st.integers(0, EPOCHS - 1), st.integers(0, LAYERS - 1)))
rarely = st.sampled_from([False, False, True])
programs = st.builds(
    Program,
    samples=st.sampled_from([96, 96, 90, 100]),
    drop_last=flags,
    norm=flags,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    two_optimizers=rarely,
    schedule=st.sampled_from(["", *sorted(SCHEDULES)]),
    schedule_by_epoch=flags,
    schedule_given=flags,
    accumulate=st.sampled_from([1, 1, 1, 2]),
    clip=st.sampled_from([0.0, 0.5]),
    skip=st.sampled_from(["", "", "before", "forward", "backward"]),
    penalty=rarely,
    two_losses=rarely,
    closure=rarely,
    zero_behind=flags,
    average=st.sampled_from(["", "torch", "own"]),
    freeze=layer_changes,
    thaw=layer_changes,
    evaluates=flags,
    stops_at=st.sampled_from([EPOCHS, EPOCHS, 2]),
    keeps_best=rarely,
)
runs = st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (GROWN, 1), (RESCALED, 1), (RESCALED, 2)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        Program(skip="forward", average="own", zero_behind=True),
        # The joiner's first batch is one of them: it gives no gradient to make buckets for.
        Program(samples=100, skip="before", optimizer="adam"),
    ],
)
def test_a_joiner_trains_alike_where_batches_are_left_out(program: Program) -> None:
    assert outcome(program, GROWN, 1) == "alike"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_no_program_trains_otherwise_without_a_word() -> None:
    """Many programs are trained in two ways each."""
    told: Counter[str] = Counter()

    @settings(
        max_examples=PROGRAMS,
        deadline=None,
        database=None,
        # The same ones each time, unless somebody looks for more.
        derandomize="ELASTUNE_PROGRAMS" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )
    @example(Program(), (RESCALED, 1))
    @given(programs, runs)
    def trains_alike(program: Program, run: tuple[int, int]) -> None:
        told[outcome(program, *run)] += 1

    trains_alike()
    print(*(f"{count:5} {words}" for words, count in told.most_common()), sep="\n")
    assert told["alike"] > 0.3 * told.total()


def outcome(program: Program, replicas: int, passes: int) -> str:
    expected, error = in_plain_pytorch(program), None
    try:
        ends = as_trial(program, replicas, passes)
    except AssertionError as caught:
        error = str(caught)
    if error is not None:
        words = [line for line in error.splitlines() if line.startswith(REFUSED)]
        assert words, f"{program!r} on {replicas}, {passes} passes\n{error}"
        return words[0].partition(": ")[2]
    survivors = [weights for weights in ends if weights is not None]
    is_killed = replicas == RESCALED and program.steps > KILL_AT
    assert len(survivors) == (replicas if replicas > 0 else 3 - is_killed)
    # The replica that is killed may have left out its last update, which the others hear of in the next step's sum: it
    # does not live to make that.
    left_out_last = program.skip == "backward" and (KILL_AT - 1) % program.steps_per_epoch == 0
    if is_killed and left_out_last:
        assert survivors[0] == survivors[1]
        return "alike, but for what the killed replica had left out"
    for weights in survivors:
        assert weights == pytest.approx(expected, abs=2e-5), f"{program!r} on {replicas}, {passes} passes"
    return "alike"
