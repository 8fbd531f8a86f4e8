"""A script written for AdaptDL, with its import changed: it trains here as it did there.

python examples/adaptdl_port.py                        # alone
torchrun --nproc-per-node 2 examples/adaptdl_port.py   # on two processes
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import dist_core.adaptdl.torch as adl  # was: import adaptdl.torch as adl

adl.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
digits, answers = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
train = TensorDataset(digits[:1500].float() / 16, answers[:1500])
held_out = TensorDataset(digits[1500:].float() / 16, answers[1500:])

loader = adl.AdaptiveDataLoader(train, batch_size=64, shuffle=True, drop_last=True)
loader.autoscale_batch_size(512, local_bsz_bounds=(16, 256))
valid = adl.AdaptiveDataLoader(held_out, batch_size=64)

net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [8], 0.1)
model = adl.AdaptiveDataParallel(net, optimizer, schedule)

for _ in adl.remaining_epochs_until(10):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    schedule.step()
    model.eval()
    stats = adl.Accumulator()
    with torch.no_grad():
        for x, y in valid:
            stats["right"] += (model(x).argmax(1) == y).sum().item()
            stats["all"] += len(y)
    with stats.synchronized():
        accuracy = stats["right"] / stats["all"]
print(f"best: accuracy {accuracy:.3f}")
