"""Imports what every training replica needs, so that a fork server can have it in memory before the first fork.

The first optimizer and the first wrapped model pull in parts of torch that are loaded lazily otherwise, its compiler
among them (about as long as importing torch).
No thread, process group or device may be touched here.
"""

from __future__ import annotations

import httpx2
import torch
import torch._dynamo

# The first client of a process loads the modules that it sends requests with.
httpx2.Client(verify=False, trust_env=False).close()
torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
