from __future__ import annotations

import pytest

from dist_core.errors import InvalidTraining
from dist_core.goodput import GradientStatistics
from dist_core.scaling_rules import LEGW, scaling_rule

STATISTICS = GradientStatistics(sqr=1.0, var=3.0)


@pytest.mark.parametrize(
    ("name", "factor"), [("adascale", 2.0), ("adamscale", 2.0**0.5), ("linear", 3.0), ("sqrt", 3.0**0.5), ("none", 1.0)]
)
def test_factors_at_three_times_the_initial_batch(name: str, factor: float) -> None:
    """AdaScale's: (3 + 1) / (3 / 3 + 1) = 2."""
    rule = scaling_rule(name, optimizer_name="SGD")
    assert rule.name == name
    assert rule.factor(3.0, STATISTICS, progress_steps=10.0) == pytest.approx(factor)
    assert rule.factor(1.0, STATISTICS, progress_steps=10.0) == pytest.approx(1.0)


def test_before_anything_is_measured_rules_that_need_it_leave_the_rate() -> None:
    for name in ("adascale", "adamscale"):
        assert scaling_rule(name, optimizer_name="SGD").factor(4.0, None, progress_steps=0.0) == 1.0


def test_legw_warms_up_over_as_many_examples_as_the_batch_is_larger() -> None:
    rule = LEGW(base_warmup_steps=100.0)
    assert rule.factor(4.0, None, progress_steps=199.0) == pytest.approx(2.0 * 200 / 400)
    assert rule.factor(4.0, None, progress_steps=1000.0) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("optimizer", "rule"), [("SGD", "adascale"), ("Adam", "adamscale"), ("AdamW", "adamscale"), ("Adagrad", "adascale")]
)
def test_the_rule_that_fits_the_optimizer(optimizer: str, rule: str) -> None:
    assert scaling_rule(None, optimizer_name=optimizer).name == rule


def test_a_rule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidTraining, match="scaling rule 'cubic' is not known; choose one of adamscale"):
        scaling_rule("cubic", optimizer_name="SGD")
