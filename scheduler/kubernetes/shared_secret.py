"""What all of a scheduler's pods must have alike: kept in a secret that the first of them fills."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence

from trials.errors import ClusterRefused
from trials.kubernetes.client.api import SECRETS, ClusterApi


def shared_secret(
    api: ClusterApi, namespace: str, secret: str, keys: Sequence[str], make: Callable[[], Mapping[str, bytes]]
) -> dict[str, bytes]:
    """The values under ``keys``; where one is missing, those that ``make`` gives are kept and returned.

    Raises ClusterRefused where the secret does not exist, and ClusterUnreachable.
    """
    kept = api.get(SECRETS, namespace, secret)
    data = kept.get("data") or {}
    if all(data.get(key) for key in keys):
        return {key: base64.b64decode(data[key]) for key in keys}
    made = dict(make())
    change = {
        "metadata": {"resourceVersion": kept["metadata"]["resourceVersion"]},
        "data": {key: base64.b64encode(value).decode() for key, value in made.items()},
    }
    try:
        api.patch(SECRETS, namespace, secret, change)
    except ClusterRefused as error:
        if error.status != 409:
            raise
        # Another pod was first.
        return shared_secret(api, namespace, secret, keys, make)
    return made
