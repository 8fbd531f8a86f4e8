"""A sweep of plain Optuna's over a small network; elastic.py beside it is the same one with elastic trials.

python examples/moons/plain.py [trials]
"""

import sys

import optuna
import torch
from sklearn.datasets import make_moons
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
points, kinds = (torch.as_tensor(each, dtype=torch.float32) for each in make_moons(2000, noise=0.2, random_state=0))
train, held_out = TensorDataset(points[:1500], kinds[:1500]), (points[1500:], kinds[1500:])


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    width = trial.suggest_int("width", 4, 64, log=True)
    model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1.0, log=True), momentum=0.9)
    loader = DataLoader(train, batch_size=50)
    loss = 0.0
    for epoch in range(12):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(nn.functional.binary_cross_entropy_with_logits(model(held_out[0])[:, 0], held_out[1]))
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss


if __name__ == "__main__":
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    print(f"best: loss {study.best_value:.4f} with {study.best_params}")
