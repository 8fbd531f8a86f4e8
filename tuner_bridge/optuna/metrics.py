"""``report_metrics``: how a trial with several objectives is doing."""

from __future__ import annotations

from collections.abc import Mapping

from optuna.trial import BaseTrial


def report_metrics(trial: BaseTrial, metrics: Mapping[str, float], step: int) -> None:
    """Tell the metrics of a trial.

    In an elastic trial, the one that ``optimize(promise_metric=...)`` names tells the scheduler how promising the
    trial is; the latest ones become the user attribute ``metrics``, as they do in a plain trial.

    Args:
        trial: The trial.
        metrics: Values by name.
        step: Step that means the same in all trials, such as an epoch.
    """
    report = getattr(trial, "report_metrics", None)
    if report is not None:
        report(metrics, step)
    else:
        trial.set_user_attr("metrics", {**{name: float(value) for name, value in metrics.items()}, "step": int(step)})
