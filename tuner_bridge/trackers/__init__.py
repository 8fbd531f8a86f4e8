"""Trackers of experiments that hear of a sweep from its driver: one run a trial, however many replicas it has.

``optimize(study, objective, trackers=[MLflow(experiment="digits")])``. None of their packages is imported unless used.
"""

from __future__ import annotations

from tuner_bridge.trackers.base import TrackedRun, Tracker, TrialIdentity
from tuner_bridge.trackers.mlflow import MLflow
from tuner_bridge.trackers.tensorboard import TensorBoard
from tuner_bridge.trackers.weights_and_biases import WeightsAndBiases

__all__ = ["MLflow", "TensorBoard", "TrackedRun", "Tracker", "TrialIdentity", "WeightsAndBiases"]
