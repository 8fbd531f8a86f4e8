"""Names of the suite's objects in a cluster: pure, and the same after every restart."""

from __future__ import annotations

import hashlib
import re
from typing import Any

Document = dict[str, Any]
"""A resource as the API server has it, or a part of one."""

GROUP = "elastune.dev"
VERSION = "v1"
FINALIZER = f"{GROUP}/replicas"
"""A trial that is deleted goes when its replicas have ended and its checkpoints are gone."""

TRIAL_LABEL = f"{GROUP}/trial"
STUDY_LABEL = f"{GROUP}/study"
REPLICA_LABEL = f"{GROUP}/replica"
SLOT_LABEL = f"{GROUP}/slot"
NODE_LABEL = f"{GROUP}/node"
"""The node that a pod was made for, also while it is not bound to it yet."""
INSTANCE_LABEL = f"{GROUP}/scheduler"
"""Label of the scheduler that a pod belongs to, where a cluster has several."""
PLACEHOLDER_LABEL = f"{GROUP}/placeholder"
LEADER_LABEL = f"{GROUP}/leader"

LONGEST_TRIAL_NAME = 50
"""Longest trial name: replica names add nine characters, and label values have at most 63."""
_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")


def camel(name: str) -> str:
    """Return a field's name as resources and the chart spell it: min_replicas is minReplicas there."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda match: f"_{match.group().lower()}", name)


def is_name(text: str, longest: int = LONGEST_TRIAL_NAME) -> bool:
    """Tell whether it can name an object, be a label's value, and begin a replica's name."""
    return len(text) <= longest and bool(_LABEL.match(text))


def object_name(words: str, longest: int) -> str:
    """Return a name that tells people what it stands for and differs for different ``words``."""
    if is_name(words, longest):
        return words
    digest = hashlib.sha256(words.encode()).hexdigest()[:8]
    readable = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[: longest - 9].strip("-")
    return f"{readable}-{digest}" if readable else f"x-{digest}"


def study_object_name(study: str) -> str:
    return object_name(study, 50)


def trial_object_name(study: str, number: int) -> str:
    """Return the object name of the trial that a tuner calls by its study and number."""
    tail = f"-{number}"
    return object_name(study, LONGEST_TRIAL_NAME - len(tail)) + tail


def label_value(text: str) -> str:
    """Return ``text`` if it may be a label's value, else a name for it."""
    return text if re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", text) else object_name(text, 63)


def qualified(namespace: str, name: str, home: str) -> str:
    """Return a trial's or a study's name within a scheduler: with the namespace in front where that is not its own."""
    return name if namespace == home else f"{namespace}.{name}"
