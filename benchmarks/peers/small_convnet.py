"""A small convolutional network that tells handwritten digits apart, learned from labels of which some are wrong.

Its learning rate matters at every point of the training: a high one learns fast, and then learns the wrong labels.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

LOWEST_RATE, HIGHEST_RATE = 1e-4, 1.0
TRAINED, WRONG, BATCH = 1000, 0.3, 32


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test data; so many of the training labels are drawn."""
    images, labels = load_digits(return_X_y=True)
    random = np.random.default_rng(0)
    order = random.permutation(len(images))
    images, labels = images[order], labels[order]
    wrong = random.random(TRAINED) < WRONG
    labels[:TRAINED][wrong] = random.integers(0, 10, int(wrong.sum()))
    x = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels)
    return TensorDataset(x[:TRAINED], y[:TRAINED]), TensorDataset(x[TRAINED:], y[TRAINED:])


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten()),
        nn.Linear(16 * 4 * 4, 10),
    )


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Return the test data's share that is told right, in percent."""
    x, y = test.tensors
    model.eval()
    with torch.no_grad():
        right = float((model(x).argmax(1) == y).float().mean())
    model.train()
    return 100.0 * right
