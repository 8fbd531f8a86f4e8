from __future__ import annotations

import pytest

from dist_core.goodput import BatchBounds, Configuration, GradientStatistics, Hints, Observation, StepProfile


def hints() -> Hints:
    return Hints(
        bounds=BatchBounds(init_batch=64, max_batch=512, min_atomic=8, max_atomic=128),
        observations=(Observation(Configuration(1, 2, 32), 0.1, 0.12, 7),),
        statistics=GradientStatistics(sqr=0.5, var=2.0),
        progress=1234.5,
        target_progress=9999.0,
        epoch=3,
        epoch_fraction=0.25,
        epoch_seconds=1.5,
        global_batch=64,
        goodput=700.0,
        rescale_pause_seconds=0.05,
    )


def test_hints_survive_the_wire() -> None:
    assert Hints.from_json(hints().to_json()) == hints()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("progress", float("nan")),
        ("progress", -1.0),
        ("goodput", float("inf")),
        ("statistics", [float("nan"), 1.0]),
        ("statistics", [-1.0, 1.0]),
        ("observations", [[1, 2, 32, -0.1, 0.1, 3]]),
        ("observations", [[3, 2, 32, 0.1, 0.1, 3]]),
        ("observations", [[1, 2, 32, 0.1, 1e9, 3]]),
    ],
)
def test_absurd_hints_are_refused_at_the_edge(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"is|has|outside"):
        Hints.from_json({**hints().to_json(), field: value})


def test_profile_answers_with_the_median_of_recent_steps() -> None:
    profile = StepProfile()
    configuration = Configuration(1, 1, 32)
    for seconds in (1.0, 1.1, 50.0, 0.9, 1.0):
        profile.add(configuration, gradient_seconds=seconds, optim_seconds=seconds)
    [row] = profile.observations()
    assert row.optim_seconds == 1.0
    profile.add(configuration, gradient_seconds=-1.0, optim_seconds=1.0)
    assert profile.observations()[0].count == 5
