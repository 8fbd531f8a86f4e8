"""The part of a scheduler's environment that belongs to its machine, and so to everybody's replicas there.

The rest is the account's that started it: its credentials, its data folders, its habits. A sweep brings its own.
"""

from __future__ import annotations

from collections.abc import Mapping

NAMES = frozenset(
    {
        "CONDA_PREFIX",
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "NO_PROXY",
        "PATH",
        "PYTHONHOME",
        "PYTHONPATH",
        "REQUESTS_CA_BUNDLE",
        "SHELL",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "no_proxy",
    }
)
BEGINNINGS = ("CUDA_", "GLOO_", "HIP_", "HSA_", "KMP_", "LC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "ROCR_", "UCX_")


def node_environ(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in NAMES or name.startswith(BEGINNINGS)}
