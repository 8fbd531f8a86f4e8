"""Tune a small CNN on scikit-learn's handwritten digits: 12 elastic trials on this machine's slots.

    python examples/digits.py                          the sweep, live in the terminal
    python examples/digits.py --storage sqlite:///d.db a study that survives; add --resume after an interruption

The objective is ordinary PyTorch; the names imported from dist_core make it elastic. A machine of few cores emulates
the GPUs that it does not have: the training is the same and real, and a step takes as long as theirs would.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from tuner_bridge import optimize

EPOCHS = int(os.environ.get("DIGITS_EPOCHS", "6"))
FEW_CORES = 4
NODES, GPUS_PER_NODE = 2, 4
RESNET50_SECONDS = 0.207
"""A step with 32 images on the GPU that is emulated, at its own speed."""


def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """1,437 training images, 360 for validation, 8 x 8 pixels."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[:1437], y[:1437]), x[1437:], y[1437:]


def network(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def objective(trial: optuna.Trial) -> float:
    train, x, y = digits()
    torch.manual_seed(0)
    model = network(trial.suggest_int("width", 4, 16, log=True), trial.suggest_float("dropout", 0.0, 0.5))
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=trial.suggest_float("lr", 1e-3, 0.3, log=True),
        momentum=trial.suggest_float("momentum", 0.0, 0.95),
    )
    loader = AdaptiveDataLoader(train, batch_size=32, shuffle=True)
    loader.autoscale_batch_size(128, local_bsz_bounds=(8, 128))
    model = AdaptiveDataParallel(model, optimizer)
    accuracy = 0.0
    for epoch in remaining_epochs_until(EPOCHS):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


def emulated() -> str:
    """Two nodes of four GPUs, as fast as this machine can feed.

    Passes alone are to take a tenth of its time: updates, reductions and agreements of eight processes take more.
    """
    model, images = network(16, 0.0), torch.zeros(32, 1, 8, 8)
    torch.set_num_threads(1)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        model(images).sum().backward()
        seconds.append(time.perf_counter() - began)
    shortest_step = 10 * NODES * GPUS_PER_NODE * statistics.median(seconds) / len(os.sched_getaffinity(0))
    return f"{NODES}x{GPUS_PER_NODE}:resnet50-imagenet@{max(3, min(8, round(RESNET50_SECONDS / shortest_step)))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--slots", type=int, default=None, help="replicas at a time, over all trials, on this machine")
    parser.add_argument("--emulate", default=None, help="devices to emulate; default: GPUs, where there are few cores")
    parser.add_argument("--storage", default=None)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--output", default="elastune-demo", help="folder for state and pictures")
    arguments = parser.parse_args()
    study = optuna.create_study(
        study_name="digits",
        storage=arguments.storage,
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3),
    )
    emulate = arguments.emulate
    if emulate is None and arguments.slots is None and not os.environ.get("ELASTUNE_URL"):
        emulate = emulated() if max(torch.cuda.device_count(), len(os.sched_getaffinity(0))) < FEW_CORES else None
    began = time.monotonic()
    optimize(
        study,
        objective,
        n_trials=arguments.trials,
        n_jobs=arguments.jobs,
        max_replicas=4,
        slots=arguments.slots,
        emulate=emulate,
        state_dir=f"{arguments.output}/state",
        resume=arguments.resume,
        live=True,
        timeline=f"{arguments.output}/slots",
    )
    print(f"\n{len(study.trials)} trials in {time.monotonic() - began:.0f} s")
    print(
        f"{'trial':>5} {'state':9} {'accuracy':>8} {'width':>5} {'dropout':>7} {'lr':>8} {'momentum':>8} {'epochs':>6}"
    )
    for trial in study.trials:
        value = f"{trial.value:.4f}" if trial.value is not None else "-"
        p = trial.params
        print(
            f"{trial.number:>5} {trial.state.name.lower():9} {value:>8} {p['width']:>5} {p['dropout']:>7.3f} "
            f"{p['lr']:>8.4f} {p['momentum']:>8.3f} {len(trial.intermediate_values):>6}"
        )
    print(f"best: trial {study.best_trial.number} with accuracy {study.best_value:.4f} and {study.best_params}")


if __name__ == "__main__":
    main()
