"""Refusals by the scheduler, told apart from answers of others in its place."""

from __future__ import annotations

import json
from typing import Any


def refusal(content: bytes) -> str | None:
    """Return the scheduler's reason, out of an answer of status 4xx; None for others' answers.

    The scheduler gives a ``detail`` with each refusal. Proxies, ingresses and gateways in front of it, and routers
    while a Service of Kubernetes changes its target, answer 404 or 403 in words of their own: then it is away, and the
    request can be sent again.
    """
    try:
        detail = json.loads(content)["detail"]
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(detail, str):
        return detail
    # What is wrong with single fields, as FastAPI lists it.
    fields = detail if isinstance(detail, list) else []
    told = [_told(each) for each in fields if isinstance(each, dict) and "msg" in each and "loc" in each]
    return "; ".join(told) if told and len(told) == len(fields) else json.dumps(detail)


def _told(error: dict[str, Any]) -> str:
    _, *where = error["loc"] if isinstance(error["loc"], list) and error["loc"] else [""]
    value = f" (it is {error['input']!r:.80})" if "input" in error else ""
    return f"{'.'.join(map(str, where)) or 'the request'}: {error['msg']}{value}"
