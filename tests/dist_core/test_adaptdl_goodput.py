"""AdaptDL's goodput functions as scripts and notebooks call them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_core.adaptdl.goodput import GoodputFunction, GradParams, PerfParams, fit_perf_params

TRUE = PerfParams(0.02, 0.001, 0.05, 0.01, 0.01, 0.002, 1.5)
parameters = st.tuples(*([st.floats(1e-3, 10.0)] * 6), st.floats(1.0, 10.0))
statistics = st.tuples(st.floats(1e-3, 10.0), st.floats(1e-3, 10.0))


@given(parameters, statistics, st.booleans())
def test_what_is_best_is_permitted_and_its_goodput_is_that_of_the_function(
    perf: tuple[float, ...], grad: tuple[float, ...], accumulation: bool
) -> None:
    function = GoodputFunction(PerfParams(*perf), GradParams(*grad), 128)
    replicas = np.arange(1, 20)
    nodes = np.ones_like(replicas)
    goodput, atomic, steps = function.optimize(
        nodes, replicas, max_batch_size=1280, atomic_bsz_range=(64, 256), accumulation=accumulation
    )
    assert goodput.shape == atomic.shape == steps.shape == (19,)
    assert ((atomic >= 64) & (atomic <= 256)).all()
    assert accumulation or not steps.any()
    total = atomic * replicas * (steps + 1)
    assert ((total < 1280 + replicas * (steps + 1)) | (goodput == 0)).all()
    assert np.allclose(goodput, np.where(goodput > 0, function(nodes, replicas, atomic, steps), 0.0))
    assert np.allclose(
        function(nodes, replicas, atomic, steps),
        function.throughput(nodes, replicas, atomic, steps) * function.efficiency(total),
    )


def test_numbers_come_for_numbers_and_the_batch_is_divided_evenly() -> None:
    function = GoodputFunction(TRUE, GradParams(1.0, 2.0), 128)
    goodput, atomic, steps = function.optimize(1, 3)
    assert isinstance(goodput, float)
    assert (atomic, steps) == (43, 0)
    assert goodput == pytest.approx(function(1, 3, 43, 0))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [((0, 1), "at least one node"), ((2, 1), "at least one replica on each"), ((1, 1, 64), "max_batch_size is 64")],
)
def test_what_cannot_be_is_refused(arguments: tuple[Any, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        GoodputFunction(TRUE, GradParams(1.0, 2.0), 128).optimize(*arguments)


def test_measured_steps_give_the_model_they_came_from() -> None:
    random = np.random.default_rng(0)
    replicas = random.integers(1, 9, 200)
    nodes = np.minimum(replicas, random.integers(1, 3, 200))
    local = random.integers(16, 512, 200)
    function = GoodputFunction(TRUE, GradParams(1.0, 2.0), 128)
    compute = TRUE.alpha_c + TRUE.beta_c * local
    step = local * replicas / function.throughput(nodes, replicas, local, 0)
    noise = random.uniform(0.99, 1.01, 200)
    fitted = fit_perf_params(nodes, replicas, local, np.zeros(200), step * noise, compute * noise, compute * noise)
    again = GoodputFunction(fitted, GradParams(1.0, 2.0), 128)
    ratio = again.throughput(nodes, replicas, local, 0) / function.throughput(nodes, replicas, local, 0)
    assert np.abs(ratio - 1.0).max() < 0.05
    with pytest.raises(ValueError, match="no measured steps"):
        fit_perf_params([], [], [], [], [], [], [])
