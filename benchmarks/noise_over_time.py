"""`python -m benchmarks.noise_over_time FILE.png`: noise scale and batch size over one adaptive run on digits."""

from __future__ import annotations

import sys

import matplotlib as mpl
import torch
from torch import nn

from benchmarks.digits_accuracy import BASE_RATE, INIT_BATCH, data, network
from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from dist_core.trial.current import get_core

EPOCHS = 60


def record() -> tuple[list[float], list[float], list[int]]:
    """Progress in epochs, noise scale in examples, and batch size, step by step."""
    torch.manual_seed(0)
    dataset, _, _ = data(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_RATE, momentum=0.9)
    loader = AdaptiveDataLoader(dataset, batch_size=INIT_BATCH, shuffle=True)
    loader.autoscale_batch_size(512, local_bsz_bounds=(4, 512))
    wrapped = AdaptiveDataParallel(model, optimizer)
    core = get_core()
    progress, scale, batch = [], [], []
    for _ in remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            statistics = wrapped.statistics
            if statistics is not None and wrapped.stepped:
                progress.append(core.position.progress / len(dataset))
                scale.append(INIT_BATCH * statistics.var / statistics.sqr)
                batch.append(loader.current_batch_size)
    return progress, scale, batch


def main() -> None:
    mpl.use("Agg")
    from matplotlib import pyplot

    progress, scale, batch = record()
    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.plot(progress, scale, color="tab:orange", label="gradient noise scale")
    axes.step(progress, batch, color="tab:blue", where="post", label="global batch size")
    axes.set_yscale("log", base=2)
    axes.set_xlabel("progress, epochs at the initial batch size")
    axes.set_ylabel("examples")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
