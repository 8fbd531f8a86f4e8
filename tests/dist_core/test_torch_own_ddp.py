"""PyTorch's own tests of DistributedDataParallel pass with AdaptiveDataParallel in its place, or stand in this list."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.project import ROOT

LEAST = 45
"""Tests that torch's own class passes without a GPU."""
GIVEN = "was given {}=; it makes process groups and sends weights and buffers to other replicas itself"
HOOK = r"has no register_comm_hook\(\)"
JOIN = r"has no join\(\)"
OWN_OPTIMIZER = "of a model that was wrapped without it"
"""The test makes its optimizer behind the wrapper, which is to be given it."""
REFUSED = {
    "test_DistributedDataParallel_requires_grad": "was wrapped without an optimizer",
    "test_DistributedDataParallel_with_amp_and_grad_is_view": OWN_OPTIMIZER,
    "test_ddp_broadcast_buffers_deprecation_warning": GIVEN.format("broadcast_buffers"),
    "test_ddp_buffer_hook_allreduce": GIVEN.format("broadcast_buffers"),
    "test_ddp_buffer_hook_allreduce_return_future": GIVEN.format("broadcast_buffers"),
    "test_ddp_comm_hook_logging": HOOK,
    "test_ddp_device_mesh_initialization": GIVEN.format("device_mesh"),
    "test_ddp_grad_div_uneven_inputs": JOIN,
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false": GIVEN.format("forward_sync_buffers"),
    "test_ddp_join_model_equivalence": JOIN,
    "test_ddp_join_respects_forward_sync_buffers_false": GIVEN.format("forward_sync_buffers"),
    "test_ddp_python_error_logged": HOOK,
    "test_ddp_uneven_input_exception": JOIN,
    "test_ddp_uneven_input_join_disable": JOIN,
    "test_post_localSGD_optimizer_parity": OWN_OPTIMIZER,
    "test_post_localSGD_optimizer_parity_grad_is_view": OWN_OPTIMIZER,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": OWN_OPTIMIZER,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": OWN_OPTIMIZER,
    "test_post_localSGD_optimizer_step_reload": OWN_OPTIMIZER,
    # Torch's log of its reducer says how many ranks there were when the model was wrapped; here they change.
    "test_ddp_logging_data_cpu": "Expected 2 but got 1",
    # One wrapper within another, which torch's own does not train either with gradients that are views of buckets.
    "test_ddp_static_graph_nested_types": "is not the expected DDP bucket view",
    # Weights become those of rank 0 when the ranks meet, in the first forward pass, and not when a model is wrapped.
    "test_ddp_sync_module_states": "Tensor-likes are not close",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchs_own_tests_pass_or_are_refused_by_name() -> None:
    """Needs a minute: each test starts two processes, and they run with torch's class too, to say which need a GPU."""
    need_no_gpu = [name for name, wrong in outcomes("torch").items() if not wrong]
    assert len(need_no_gpu) >= LEAST, need_no_gpu
    failed = {name: wrong for name, wrong in outcomes("elastune", *need_no_gpu).items() if wrong}
    unexpected = {name: wrong for name, wrong in failed.items() if not re.search(REFUSED.get(name, "^$"), wrong)}
    assert not unexpected, "\n".join(f"{name}: {wrong}" for name, wrong in unexpected.items())
    assert set(REFUSED) & set(need_no_gpu) == set(failed), "tests that pass by now stand in the list"


def outcomes(kind: str, *names: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.torch_own_ddp", kind, *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["test'))
