"""What the scheduler says when it refuses a request, told apart from what others say in its place."""

from __future__ import annotations

import json


def refusal(content: bytes) -> str | None:
    """The scheduler's reason, out of an answer of status 4xx; None: this answer is not the scheduler's.

    The scheduler gives a ``detail`` with each refusal. Proxies, ingresses and gateways in front of it, and routers
    while a Service of Kubernetes changes its target, answer 404 or 403 in words of their own: then it is away, and the
    request can be sent again.
    """
    try:
        detail = json.loads(content)["detail"]
    except (ValueError, KeyError, TypeError):
        return None
    return detail if isinstance(detail, str) else json.dumps(detail)
