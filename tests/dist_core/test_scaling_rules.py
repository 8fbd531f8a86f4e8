from __future__ import annotations

import pytest
import torch

from dist_core.errors import InvalidTraining
from dist_core.goodput import GradientStatistics
from dist_core.gradients.learning_rate import LEGW, is_known, scaling_rule

STATISTICS = GradientStatistics(sqr=1.0, var=3.0)


@pytest.mark.parametrize(
    ("name", "factor"), [("adascale", 2.0), ("adamscale", 2.0**0.5), ("linear", 3.0), ("sqrt", 3.0**0.5), ("none", 1.0)]
)
def test_factors_at_three_times_the_initial_batch(name: str, factor: float) -> None:
    """AdaScale's: (3 + 1) / (3 / 3 + 1) = 2."""
    rule = scaling_rule(name, optimizer=torch.optim.SGD)
    assert rule.name == name
    assert rule.factor(3.0, STATISTICS, progress_steps=10.0) == pytest.approx(factor)
    assert rule.factor(1.0, STATISTICS, progress_steps=10.0) == pytest.approx(1.0)


def test_before_anything_is_measured_rules_that_need_it_leave_the_rate() -> None:
    for name in ("adascale", "adamscale"):
        assert scaling_rule(name, optimizer=torch.optim.SGD).factor(4.0, None, progress_steps=0.0) == 1.0


def test_legw_warms_up_over_as_many_examples_as_the_batch_is_larger() -> None:
    rule = LEGW(base_warmup_steps=100.0)
    assert rule.factor(4.0, None, progress_steps=199.0) == pytest.approx(2.0 * 200 / 400)
    assert rule.factor(4.0, None, progress_steps=1000.0) == pytest.approx(2.0)


class Unheard(torch.optim.Optimizer):
    pass


class ShampooOfTheirOwn(torch.optim.Optimizer):
    pass


class MomentumSGD(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "rule", "known"),
    [
        (torch.optim.SGD, "adascale", True),
        (MomentumSGD, "adascale", True),
        *((each, "adamscale", True) for each in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)),
        *((each, "adamscale", True) for each in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.RMSprop)),
        (ShampooOfTheirOwn, "adamscale", True),
        (Unheard, "adamscale", False),
    ],
)
def test_the_rule_that_fits_the_optimizer(optimizer: type, rule: str, known: bool) -> None:
    assert scaling_rule(None, optimizer=optimizer).name == rule
    assert is_known(optimizer) is known


def test_a_rule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidTraining, match="scaling rule 'cubic' is not known; choose one of adamscale"):
        scaling_rule("cubic", optimizer=torch.optim.SGD)
