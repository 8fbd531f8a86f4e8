"""Objectives that the sweeps of these tests run in real replicas."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import optuna.terminator
import torch
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, register_state, remaining_epochs_until, world_size
from dist_core.state.states import FunctionState
from dist_core.trial.current import get_core
from tuner_bridge import report_metrics, stage


def quadratic(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", -10.0, 10.0)
    y = trial.suggest_int("y", 0, 5)
    kind = trial.suggest_categorical("kind", ["a", "b", None, 3, True])
    return (x - 2.0) ** 2 + y + (kind == "a")


def pruned_by_median(trial: optuna.Trial) -> float:
    value = trial.suggest_float("value", 0.0, 1.0)
    for step in range(5):
        trial.report(value, step)
        if trial.should_prune():
            raise optuna.TrialPruned(f"at step {step}")
    return value


def smooth(trial: optuna.Trial) -> float:
    return (trial.suggest_float("x", -10.0, 10.0) - 2.0) ** 2 + trial.suggest_float("rate", 1e-5, 1.0, log=True)


def on_the_grid(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", -3.0, 2.0, step=1.0)
    return x**2 + trial.suggest_int("y", 0, 3, step=3) + (trial.suggest_categorical("kind", ["a", "b"]) == "a")


def pruned_early(trial: optuna.Trial) -> float:
    value = trial.suggest_float("value", 0.0, 1.0)
    for step in range(1, 6):
        trial.report(value + 0.1 * ((trial.number * step) % 3), step)
        if trial.should_prune():
            raise optuna.TrialPruned(f"at step {step}")
    return value


def two_values(trial: optuna.Trial) -> tuple[float, float]:
    x = trial.suggest_float("x", 0.0, 1.0)
    for step in range(2):
        report_metrics(trial, {"accuracy": x * (step + 1), "size": 1.0}, step)
    return x, x**2


def constrained(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", 0.0, 1.0)
    trial.set_constraint("at least a third", 1 / 3 - x)
    return x


def uploads(trial: optuna.Trial) -> float:
    folder = trial.study.user_attrs["folder"]
    with tempfile.TemporaryDirectory() as own:
        path = Path(own) / "notes.txt"
        path.write_text("from a replica")
        store = optuna.artifacts.FileSystemArtifactStore(folder)
        optuna.artifacts.upload_artifact(artifact_store=store, file_path=str(path), study_or_trial=trial)
    return 0.0


def stops_the_study(trial: optuna.Trial) -> float:
    study = trial.study
    assert study.direction is optuna.study.StudyDirection.MINIMIZE
    assert study.directions == [study.direction]
    if trial.number:
        assert study.best_value == 0.0
    study.set_user_attr("seen", trial.number)
    assert study.user_attrs["seen"] == trial.number
    if trial.number == 2:
        study.stop()
    return float(trial.number)


def looks_at_trials(trial: optuna.Trial) -> float:
    return float(len(trial.study.trials))


def looks_at_storage(trial: optuna.Trial) -> float:
    return float(len(trial.storage.get_all_trials(0)))


def looks_at_relative_params(trial: optuna.Trial) -> float:
    return float(len(trial.relative_params))


def cross_validates(trial: optuna.Trial) -> float:
    scores = [trial.suggest_float("x", 0.0, 1.0), 0.5, 0.25]
    optuna.terminator.report_cross_validation_scores(trial, scores)
    return sum(scores)


def naps(trial: optuna.Trial) -> float:
    time.sleep(0.3)
    return trial.suggest_float("x", 0.0, 1.0)


def sometimes_raises(trial: optuna.Trial) -> float:
    if trial.number % 2:
        raise ValueError(f"trial {trial.number} on purpose")
    return float(trial.number)


def always_raises(trial: optuna.Trial) -> float:
    raise KeyError("at once")


def returns_nan(trial: optuna.Trial) -> float:
    trial.report(float("nan"), 0)
    return float("nan")


def sets_all_kinds(trial: optuna.Trial) -> float:
    scores = np.array([0.82, 0.92, 1.02]) - trial.number
    for name, value in {
        "array": scores,
        "scalar": np.float32(0.1),
        "tuple": (1, "two", None),
        "nested": {"deep": [{1: 2.5}, {"x": (3,)}], (1, 2): b"raw"},
        "set": {1, 2},
        "file": os.fsdecode(b"caf\xe9.csv"),
    }.items():
        trial.set_user_attr(name, value)
    optuna.terminator.report_cross_validation_scores(trial, scores)  # type: ignore[arg-type]  # as scikit-learn has it
    return float(scores.mean())


def sets_a_model(trial: optuna.Trial) -> float:
    try:
        trial.set_user_attr("model", object())
    except TypeError as error:
        trial.set_user_attr("refused", str(error))
    return 0.0


def returns_nothing(trial: optuna.Trial) -> None:
    trial.suggest_float("x", 0.0, 1.0)


def bad_distribution(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", 1.0, 0.0)


def uses_attributes(trial: optuna.Trial) -> float:
    trial.set_user_attr("note", {"a": [1, 2.5]})
    assert trial.user_attrs["note"] == {"a": [1, 2.5]}
    x = trial.suggest_float("x", 0.0, 1.0)
    assert trial.params == {"x": x}
    assert trial.distributions == {"x": optuna.distributions.FloatDistribution(0.0, 1.0)}
    assert trial.datetime_start is not None
    return x


def sleeps(trial: optuna.Trial) -> float:
    trial.suggest_float("x", 0.0, 1.0)
    time.sleep(600)
    return 0.0


def trains(trial: optuna.Trial) -> float:
    """Elastic training; each replica notes its parameters. ``KILL_ONCE`` names a file whose absence means: die once."""
    rate = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    momentum = trial.suggest_float("momentum", 0.0, 0.9)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, 4, generator=generator)
    data = TensorDataset(x, x.sum(dim=1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    loader = AdaptiveDataLoader(data, batch_size=16, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer)
    loss = torch.tensor(0.0)
    for epoch in remaining_epochs_until(int(os.environ.get("EPOCHS", "6"))):
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(wrapped(inputs).squeeze(1), target)
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
            _note(trial, rate, momentum)
            _maybe_die(epoch)
        trial.report(float(loss), epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return float(loss)


def reports_until_it_has_grown(trial: optuna.Trial) -> float:
    """The first trial is over at once; the other gets its slot, reports some more, and tells its replicas."""
    if trial.number == 0:
        return 0.0
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(128, 4)), batch_size=32)
    wrapped = AdaptiveDataParallel(model, optimizer)
    asked_after_growing = 0
    for epoch in remaining_epochs_until(400):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            time.sleep(0.002 * len(x))
        trial.report(float(epoch), epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
        asked_after_growing += world_size() == 2
        if asked_after_growing == 3:
            break
    return float(world_size())


def tells_its_step_times(trial: optuna.Trial) -> float:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(128, 4)), batch_size=16)
    wrapped = AdaptiveDataParallel(model, optimizer)
    for _ in remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
    adaptation = get_core().adaptation
    assert adaptation is not None
    trial.set_user_attr("observations", [row.to_row() for row in adaptation.profile.observations()])
    return 0.0


class _WhoseWorkerIsKilled(torch.utils.data.Dataset[torch.Tensor]):
    """Once, in the middle of a pass: ``KILL_ONCE`` names the file that says that it was."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        marker = Path(os.environ["KILL_ONCE"])
        if index == 40 and torch.utils.data.get_worker_info() is not None and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), index / 64)


def loses_a_data_worker(trial: optuna.Trial) -> float:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
    loader = AdaptiveDataLoader(_WhoseWorkerIsKilled(), batch_size=16, num_workers=1)
    wrapped = AdaptiveDataParallel(model, optimizer)
    in_the_body = trial.suggest_categorical("in_the_body", [False, True]) and not os.path.exists(
        os.environ["KILL_ONCE"]
    )
    for epoch in remaining_epochs_until(2):
        for x in loader:
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            while in_the_body:  # until it is heard of
                time.sleep(0.01)
        trial.report(float(epoch), epoch)
    return float(loader.cursor.passes)


def _note(trial: optuna.Trial, rate: float, momentum: float) -> None:
    folder = os.environ.get("NOTES")
    if folder:
        core = get_core()
        line = f"{trial.number} {core.generation.group.world_size} {rate!r} {momentum!r}\n"
        with open(Path(folder) / f"{os.getpid()}.txt", "a") as file:
            file.write(line)


def _maybe_die(epoch: int) -> None:
    marker = os.environ.get("KILL_ONCE")
    if marker and epoch == 3 and get_core().generation.group.rank == 0:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def reports_at_a_step_that_nobody_counts_to(trial: optuna.Trial) -> float:
    trial.report(1.0, 2**63)
    return 1.0


def reports_at_such_a_step_later(trial: optuna.Trial) -> float:
    trial.report(1.0, 1)
    trial.report(1.0, 2**63)
    return 1.0


def sets_more_than_the_scheduler_takes(trial: optuna.Trial) -> float:
    trial.set_user_attr("words", "x" * 40_000_000)
    return 1.0


def sets_what_is_nested_too_deep(trial: optuna.Trial) -> float:
    value: Any = 1
    for _ in range(400):
        value = [value]
    trial.set_user_attr("value", value)
    return 1.0


def sets_large_integers(trial: optuna.Trial) -> float:
    trial.set_user_attr("value", [2**63, {"a": -(2**70)}])
    return float(2**63)


def descends(trial: optuna.Trial) -> float:
    """A linear model whose loss falls with each epoch, the faster the larger the rate."""
    rate, epochs = trial.suggest_float("lr", 1e-6, 0.2, log=True), trial.suggest_int("epochs", 1, 8)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(128, 4, generator=generator)
    target = inputs @ torch.randn(4, 1, generator=generator)
    torch.manual_seed(2)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = AdaptiveDataLoader(TensorDataset(inputs, target), batch_size=32, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer)
    loss = float("nan")
    for epoch in remaining_epochs_until(epochs):
        for some, wanted in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(wrapped(some), wanted).backward()
            optimizer.step()
            time.sleep(0.02)
        with torch.no_grad():
            loss = float(torch.nn.functional.mse_loss(model(inputs), target))
        trial.report(loss, epoch)
    return loss


def branches_off_alone(trial: optuna.Trial) -> float:
    """A linear model of six epochs, whose weights decay from the fourth on; its generators are seeded."""
    rate = trial.suggest_categorical("lr", [0.02, 0.1])
    torch.manual_seed(2)
    inputs = torch.randn(128, 4)
    target = inputs @ torch.randn(4, 1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    loader = AdaptiveDataLoader(TensorDataset(inputs, target), batch_size=32, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer)
    loss = float("nan")
    for epoch in remaining_epochs_until(6):
        decay = trial.suggest_categorical("late", [0.0, 0.01, 0.1, 1.0]) if epoch >= 3 else 0.0
        for some, wanted in loader:
            optimizer.zero_grad()
            (torch.nn.functional.mse_loss(wrapped(some), wanted) + decay * model.weight.square().sum()).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(torch.nn.functional.mse_loss(model(inputs), target))
        with open(os.environ["TRACE_FILE"], "a") as file:
            file.write(f"{trial.number} {epoch}\n")
        trial.report(loss, epoch)
    return loss


@stage("late", from_epoch=3)
def branches_off(trial: optuna.Trial) -> float:
    return branches_off_alone(trial)


def counts_its_samples(trial: optuna.Trial) -> float:
    """Trains without end and counts each sample in its state; the scores that it reports are drawn by lot."""
    rate = trial.suggest_float("lr", 1e-3, 0.1, log=True)
    samples = 48
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    counts = torch.zeros(samples, dtype=torch.int64)

    def load(state: dict[str, Any]) -> None:
        counts.copy_(state["counts"])

    register_state("counts", FunctionState(lambda: {"counts": counts.clone()}, load))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    numbers = torch.arange(samples)
    loader = AdaptiveDataLoader(TensorDataset(numbers, numbers[:, None] / samples), batch_size=8, shuffle=True)
    wrapped = AdaptiveDataParallel(model, optimizer)
    score = 0.0
    for epoch in remaining_epochs_until(10**6):
        for taken, some in loader:
            optimizer.zero_grad()
            wrapped(some).square().mean().backward()
            optimizer.step()
            counts[taken] += 1
            time.sleep(0.01)
        if not bool((counts == epoch + 1).all()):
            raise AssertionError(f"after epoch {epoch} the samples were trained {sorted(set(counts.tolist()))} times")
        score = float(np.random.default_rng((trial.number, epoch)).random())
        trial.report(score, epoch)
    return score
