"""Environment variables of a sweep that its trials get where a scheduler is shared, or elsewhere.

Settings of well-known tools are sent by themselves; what could be a secret is only where it is asked for.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterable, Mapping

from trials.checks import LONGEST_NAME
from trials.plain_words import one_line
from tuner_bridge.errors import InvalidSweep

BEGINNINGS = (
    "CLEARML_",
    "COMET_",
    "CUBLAS_",
    "CUDNN_",
    "DATASETS_",
    "HF_",
    "HUGGINGFACE_",
    "JAX_",
    "KERAS_",
    "MLFLOW_",
    "NEPTUNE_",
    "PYTORCH_",
    "TF_",
    "TOKENIZERS_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRANSFORMERS_",
    "TRITON_",
    "WANDB_",
    "XLA_",
)
NAMES = frozenset({"PYTHONHASHSEED"})
_SECRET = re.compile(r"(^|_)(KEYS?|TOKENS?|SECRETS?|PASSWORD|PASSWD|PASS|CREDENTIALS?|AUTH|APIKEY|PAT)(_|$)")
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
OURS = ("ELASTUNE_",)

Asked = Mapping[str, str] | Iterable[str] | None
"""Variables with their values, or names of this process's own."""


def sent_environ(asked: Asked, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the default variables and those that were asked for; raise InvalidSweep for names not set here."""
    environ = os.environ if environ is None else environ
    sent = {name: value for name, value in environ.items() if _is_default(name) and not _SECRET.search(name.upper())}
    return {**sent, **_asked_for(asked, environ)}


def withheld(asked: Asked, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return settings of well-known tools that could be secrets, and so are not sent unless they are asked for."""
    environ = os.environ if environ is None else environ
    wanted = _asked_for(asked, environ)
    return sorted(name for name in environ if _is_default(name) and _SECRET.search(name.upper()) and name not in wanted)


def asked_environ(asked: Asked) -> dict[str, str]:
    """Return only the variables that were asked for; raises InvalidSweep for names that are not set here."""
    return _asked_for(asked, os.environ)


def library_settings(asked: Asked) -> dict[str, str]:
    """Return those asked for that are settings of well-known tools, which look at them while they are imported."""
    return {name: value for name, value in asked_environ(asked).items() if _is_default(name)}


def _is_default(name: str) -> bool:
    return name in NAMES or name.startswith(BEGINNINGS)


def _asked_for(asked: Asked, environ: Mapping[str, str]) -> dict[str, str]:
    if asked is None:
        return {}
    if isinstance(asked, str) or not isinstance(asked, Iterable):
        raise InvalidSweep(
            f"environ is {asked!r}; it must be a list of names, such as [{asked!r}], or a mapping of names to values"
        )
    for name in asked:
        if not isinstance(name, str) or not _NAME.match(name) or name.startswith(OURS):
            raise InvalidSweep(
                f"environ names {name!r}; it must be the name of a variable, and not one of Elastune's own"
            )
    variables = dict(asked) if isinstance(asked, Mapping) else {name: environ.get(name) for name in asked}
    for name, value in variables.items():
        if value is None:
            raise InvalidSweep(
                f"environ names {name!r}, which is not set here; set it, or give its value: environ={{{name!r}: ...}}"
            )
        if not isinstance(value, str) or "\0" in value:
            raise InvalidSweep(f"environ sets {name!r} to {value!r:.80}; the value must be a string without NUL")
    return {name: str(value) for name, value in variables.items()}


def this_user() -> str:
    """Empty where the machine does not know."""
    try:
        return one_line(getpass.getuser())[:LONGEST_NAME]
    except (KeyError, OSError):
        return ""
