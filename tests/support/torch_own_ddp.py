"""PyTorch's own tests of DistributedDataParallel, with another class in its place: ``python torch_own_ddp.py CLASS``.

CLASS is ``torch`` or ``elastune``. Prints a line of JSON for each test: its name, and what went wrong ("" if nothing).

Most of these tests ask for GPUs although what they test has nothing to do with them. Here devices are left out wherever
they are named, so that two processes train on the CPU over Gloo; those that pass so with torch's own class need no GPU.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from dist_core import AdaptiveDataParallel
from tests.support.ports import ReservedPort

WORLD_SIZE = 2
_TorchsOwn = nn.parallel.DistributedDataParallel


class WithoutDevices(torch.overrides.TorchFunctionMode):
    """Tensors and modules stay on the CPU, whatever device they are sent to."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return arguments[0]
        if name == "to":
            first, *others = arguments
            arguments = (first, *(each for each in others if not _names_a_device(each)))
            if len(arguments) == 1 and set(options) <= {"device", "non_blocking", "copy"}:
                return first
        if options.get("device") is not None:
            options["device"] = "cpu"
        return function(*arguments, **options)


def _names_a_device(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) or (isinstance(value, int) and not isinstance(value, bool))


class TorchsOnCPU(_TorchsOwn):
    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        super().__init__(module, **options)


class Adaptive(AdaptiveDataParallel):
    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        trained = [each for each in module.parameters() if each.requires_grad]
        super().__init__(module, torch.optim.SGD(trained, lr=0.1) if trained else [], **options)


CLASSES: dict[str, type[nn.Module]] = {"torch": TorchsOnCPU, "elastune": Adaptive}


def tests_of(kind: type[nn.Module], folder: str) -> type[unittest.TestCase]:
    """Return torch's tests with this class in place of DistributedDataParallel."""
    for each in ("barrier", "test_dir"):
        os.makedirs(os.path.join(folder, each))
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), TEMP_DIR=folder)
    decorators: Any = importlib.import_module("torch.testing._internal.common_distributed")

    def as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda test: test

    decorators.skip_if_lt_x_gpu = decorators.require_backend_is_available = as_it_is
    decorators.skip_if_no_gpu = lambda test: test
    setattr(nn.parallel, _TorchsOwn.__name__, kind)
    theirs: Any = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    for name, value in list(vars(theirs).items()):
        if value is _TorchsOwn:
            setattr(theirs, name, kind)
    nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.device_count = lambda: WORLD_SIZE

    class Tests(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            # What each imports takes longer than what it tests.
            self._start_processes(mp.get_context("fork").Process)

        @property
        def init_method(self) -> str:
            return f"file://{self.file_name}"

        @classmethod
        def _run(cls, rank: int, *arguments: Any, **options: Any) -> None:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            torch.cuda.is_available = lambda: False
            with WithoutDevices():
                super()._run(rank, *arguments, **options)

    return Tests


def of_interest(tests: type[unittest.TestCase]) -> Iterator[str]:
    for name in sorted(dir(tests)):
        if name.startswith("test"):
            test = inspect.unwrap(getattr(tests, name))
            if "ddp" in name.lower() or "DistributedDataParallel" in inspect.getsource(test):
                yield name


def outcome(test: unittest.TestCase) -> str:
    result = unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    if result.skipped:
        return f"skipped: {result.skipped[0][1]}"
    wrong = result.failures + result.errors
    return wrong[0][1] if wrong else ""


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ReservedPort() as port:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        tests = tests_of(CLASSES[sys.argv[1]], folder)
        for name in sys.argv[2:] or of_interest(tests):
            print(json.dumps([name, outcome(tests(name)) if hasattr(tests, name) else "absent"]), flush=True)
