"""A trial of NNI's PBTTuner: it goes on from the checkpoint that the tuner names, and leaves one for the next."""

from pathlib import Path

import nni
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, rank, remaining_epochs_until

parameters = nni.get_next_parameter()
torch.manual_seed(0)
digits, answers = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
digits = digits.float() / 16
net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
before = Path(parameters["load_checkpoint_dir"]) / "model.pth"
if before.exists():
    net.load_state_dict(torch.load(before, weights_only=True))
optimizer = torch.optim.SGD(net.parameters(), lr=parameters["lr"], momentum=parameters["momentum"])
loader = AdaptiveDataLoader(TensorDataset(digits[:1500], answers[:1500]), batch_size=30, shuffle=True)
model = AdaptiveDataParallel(net, optimizer)
accuracy = 0.0
for _ in remaining_epochs_until(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = float((net(digits[1500:]).argmax(1) == answers[1500:]).float().mean())
    nni.report_intermediate_result(accuracy)
if rank() == 0:
    after = Path(parameters["save_checkpoint_dir"])
    after.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), after / "model.pth")
nni.report_final_result(accuracy)
