"""Accelerate's own scripts of tests, which its package brings, pass with our Accelerator, or stand in this list.

They run in one process, and in two of torchrun's. In two a step's batch is that of one process here, where Accelerate's
own has it twice, and Accelerate is told that it is alone (`dist_core.huggingface.accelerator`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

WITH_OPTIMIZER = "without its optimizer"
REASONS = {
    # A model that trains comes with its optimizer.
    ("test_sync", "test_noop_sync", 1): WITH_OPTIMIZER,
    ("test_sync", "test_distributed_sync", 2): WITH_OPTIMIZER,
    ("test_sync", "test_distributed_sync_multiple_fwd", 2): WITH_OPTIMIZER,
    ("test_sync", "test_gradient_accumulation", 2): WITH_OPTIMIZER,
    # 80 samples are two steps of 2 x 16 and one of 16, which takes two passes too.
    ("test_sync", "test_gradient_accumulation_with_opt_and_scheduler", 1): "Learning rates",
    ("test_sync", "test_gradient_accumulation_with_opt_and_scheduler", 2): "Learning rates",
    # Accelerate's record of its own loaders.
    ("test_sync", "test_dataloader_break", 1): "active_dataloader",
    ("test_sync", "test_dataloader_break", 2): "active_dataloader",
    # Loops without a model that trains are evaluations, which see samples in their own order.
    ("test_script", "check_seedable_sampler_with_data_seed", 1): "the same items with different data seed",
    ("test_script", "check_seedable_sampler_with_data_seed", 2): "the same items with different data seed",
    # Samples are shuffled into another order than torch's.
    ("test_script", "training_check", 1): "Did not obtain the same model",
    ("test_script", "training_check", 2): "Did not obtain the same model",
    # Code that Accelerate runs on its first process first runs on all at once.
    ("test_script", "process_execution_check", 2): "Main process was not first",
    # Batches that the first process reads for all.
    ("test_script", "central_dl_preparation_check", 2): "Batch does not contain any data",
}
SCRIPTS = {
    "test_sync": (
        "test_noop_sync",
        "test_distributed_sync",
        "test_distributed_sync_multiple_fwd",
        "test_gradient_accumulation",
        "test_gradient_accumulation_with_opt_and_scheduler",
        "test_dataloader_break",
    ),
    "test_script": (
        "process_execution_check",
        "init_state_check",
        "rng_sync_check",
        "dl_preparation_check",
        "central_dl_preparation_check",
        "custom_sampler_check",
        "check_seedable_sampler",
        "check_seedable_sampler_with_data_seed",
        "training_check",
        "test_split_between_processes_list",
        "test_split_between_processes_nested_dict",
        "test_split_between_processes_tensor",
        "test_split_between_processes_evenly",
        "test_trigger",
        "test_reinstantiated_state",
    ),
}
ONE_PROCESS = {"test_noop_sync"}
TWO_PROCESSES = {"test_distributed_sync", "test_distributed_sync_multiple_fwd", "test_gradient_accumulation"}


def outcome(script: str, name: str) -> str:
    """Return what goes wrong, or nothing; runs in a process of its own."""
    import accelerate

    from dist_core.huggingface.accelerator import Accelerator

    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator
    test = getattr(importlib.import_module(f"accelerate.test_utils.scripts.{script}"), name)
    accelerator = Accelerator()
    arguments: list[Any] = [accelerator] if "accelerator" in inspect.signature(test).parameters else []
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            test(*arguments)
    except Exception as error:
        frames = inspect.trace()
        return f"{error!r} in {''.join(frames[-1].code_context or [])}"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2])
def test_accelerates_own_tests_pass_or_are_known(processes: int) -> None:
    """Needs half a minute: each test runs in fresh processes, because Accelerate keeps what it has found."""
    passed, wrong = 0, []
    for script, names in SCRIPTS.items():
        for name in names:
            if name in (TWO_PROCESSES if processes == 1 else ONE_PROCESS):
                continue
            found = next(filter(None, run_ranks(outcome, processes, script, name)), "")
            expected = REASONS.get((script, name, processes), "")
            passed += not found
            if bool(found) != bool(expected) or expected not in found:
                wrong.append(f"{script}.{name}: {found or 'passes'}, expected {expected or 'to pass'}")
    assert not wrong, "\n".join(wrong)
    assert passed >= 11
