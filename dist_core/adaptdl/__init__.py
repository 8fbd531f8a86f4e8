"""AdaptDL's names for our classes: a script written for ``adaptdl`` runs after changing its imports.

import dist_core.adaptdl as adaptdl
import dist_core.adaptdl.torch as adl

Where AdaptDL's behaviour differs from ours under the same name, ours applies: batch sizes change within a pass, every
sample is seen exactly once a pass, gradients are cleared when the script clears them.
"""

from __future__ import annotations

import os
import tempfile

from dist_core.adaptdl import collective, env

__all__ = ["collective", "env", "get_tensorboard_dir"]


def get_tensorboard_dir() -> str:
    """Return the folder for TensorBoard files: ``ADAPTDL_TENSORBOARD_LOGDIR``, else a temporary folder."""
    return os.path.join(os.environ.get("ADAPTDL_TENSORBOARD_LOGDIR", tempfile.gettempdir()), env.job_id())
