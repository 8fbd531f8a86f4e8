"""A trial of NNI's, as NNI's own examples have them; the imports of dist_core make it elastic."""

import nni
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dist_core import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until

parameters = nni.get_next_parameter()
torch.manual_seed(0)
digits, answers = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
digits = digits.float() / 16
net = nn.Sequential(nn.Linear(64, parameters["width"]), nn.ReLU(), nn.Linear(parameters["width"], 10))
optimizer = torch.optim.Adam(net.parameters(), lr=parameters["lr"])
loader = AdaptiveDataLoader(TensorDataset(digits[:1500], answers[:1500]), batch_size=30, shuffle=True)
model = AdaptiveDataParallel(net, optimizer)
accuracy = 0.0
for _ in remaining_epochs_until(6):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = float((net(digits[1500:]).argmax(1) == answers[1500:]).float().mean())
    nni.report_intermediate_result(accuracy)
nni.report_final_result(accuracy)
