"""A sweep on Kubernetes: the script of one machine, with the address of the cluster's scheduler in its environment.

    kubectl -n elastune port-forward service/elastune 7300 &
    export ELASTUNE_URL=http://127.0.0.1:7300
    export ELASTUNE_TOKEN=$(kubectl -n elastune get secret elastune-token -o jsonpath='{.data.token}' | base64 -d)
    cd examples/kubernetes && python sweep.py [trials]

The folder that it is started in is sent along. Without ELASTUNE_URL it runs on this machine.
"""

import sys

import optuna
import torch
from sklearn.datasets import make_moons
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until
from tuner_bridge import optimize


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    points, kinds = (torch.as_tensor(each, dtype=torch.float32) for each in make_moons(2000, noise=0.2, random_state=0))
    width = trial.suggest_int("width", 4, 64, log=True)
    model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1.0, log=True), momentum=0.9)
    loader = AdaptiveDataLoader(TensorDataset(points[:1500], kinds[:1500]), batch_size=50)
    wrapped = AdaptiveDataParallel(model, optimizer)
    accuracy = 0.0
    for epoch in remaining_epochs_until(12):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(wrapped(x)[:, 0], y).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = float(((model(points[1500:])[:, 0] > 0) == (kinds[1500:] > 0)).float().mean())
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


if __name__ == "__main__":
    study = optuna.create_study(
        study_name="moons-on-kubernetes", direction="maximize", sampler=optuna.samplers.TPESampler(seed=0)
    )
    optimize(study, objective, n_trials=int(sys.argv[1]) if len(sys.argv) > 1 else 8, n_jobs=2, max_replicas=2)
    print(f"best: accuracy {study.best_value:.3f} with {study.best_params}")
