"""Whatever is sent to the API, with whatever token: it answers, soon, and with nothing that the token does not open."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings

from scheduler.api import action_routes, driver_routes, replica_side
from scheduler.api.app import all_routes
from scheduler.api.hot_routes import HotRoute
from tests.support.site import TOKENS, Site

Case = schemathesis.Case[Any]
TREASURE = "what only the owner and study 'other' may see"
LONGEST_ANSWER_SECONDS = 60.0
EXAMPLES = 10
"""Of each operation; every one is sent with each kind of token."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    with pytest.MonkeyPatch.context() as patch, made.http:
        # Long polls wait for news that nobody has.
        for module, name in ((driver_routes, "LONGEST_WAIT_SECONDS"), (replica_side, "LONGEST_WAIT_SECONDS")):
            patch.setattr(module, name, 0.02)
        patch.setattr(replica_side, "ANSWER_SECONDS", 0.02)
        patch.setattr(action_routes, "DRIVER_SECONDS", 0.02)
        made.submit(0, study="other", environ={"SECRET": TREASURE}, payload={"secret": TREASURE})
        yield made
    made.store.close()


def callers(site: Site) -> dict[str, dict[str, str]]:
    """Headers by kind of token."""
    replica = next(iter(site.launcher.running), None) or site.with_replica()
    tokens = {
        "owner": TOKENS.owner,
        "study": TOKENS.for_study("s"),
        "reader": TOKENS.for_reading(),
        "replica": TOKENS.for_replica(replica),
        "nobody": "a token that nobody gave",
    }
    return {kind: {"Authorization": f"Bearer {token}", "X-Elastune-Replica": replica} for kind, token in tokens.items()}


def send(site: Site, case: Case) -> None:
    for kind, headers in callers(site).items():
        case.headers.pop("x-elastune-replica", None)
        asked = case.as_transport_kwargs(base_url="http://testserver", headers=headers)
        began = time.monotonic()
        answer = site.http.request(**{key: asked[key] for key in asked if key in REQUEST})
        assert time.monotonic() - began < LONGEST_ANSWER_SECONDS
        # A packed folder that has not come yet is asked for again.
        waits = answer.status_code == 503 and case.path == "/replica/package"
        assert waits or answer.status_code < 500, f"{kind}: {answer.status_code} {answer.text[:500]}"
        if kind == "nobody" and case.path != "/healthz":
            assert answer.status_code in (400, 401, 403, 404, 405, 413), f"{case.path}: {answer.status_code}"
        if kind != "owner":
            assert TREASURE not in answer.text, f"{kind} sees {case.path}"


def described(app: FastAPI) -> dict[str, Any]:
    """The application's schema, with the routes that FastAPI does not know."""
    schema = app.openapi()
    for route in app.routes:
        if not isinstance(route, HotRoute):
            continue
        names = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
        operation: dict[str, Any] = {"parameters": names, "responses": {"200": {"description": "an answer"}}}
        fields = {} if route.model is None else route.model.model_json_schema(ref_template=REFERENCE)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(fields.pop("$defs", {}))
        [method] = (route.methods or set()) - {"HEAD"}
        if method == "GET":
            required = fields.get("required", ())
            for name, field in fields.get("properties", {}).items():
                names.append({"name": name, "in": "query", "required": name in required, "schema": field})
        elif fields:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": fields}}}
        schema["paths"].setdefault(route.path, {})[method.lower()] = operation
    return schema


REFERENCE = "#/components/schemas/{model}"
REQUEST = {"method", "url", "headers", "params", "json", "data", "files", "content"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_request_is_answered_with_what_its_token_opens(site: Site) -> None:
    """Many requests to each route."""
    schema = schemathesis.openapi.from_dict(described(all_routes(site.service)[0]))
    sent: Counter[str] = Counter()
    for found in schema.get_all_operations():

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=found.ok().as_strategy())  # type: ignore[union-attr]  # our own schema is valid
        def every_kind(case: Case) -> None:
            sent[case.operation.label] += 1
            send(site, case)

        every_kind()
    requests = len(callers(site)) * sent.total()
    print(f"{requests} requests to {len(sent)} operations")
    assert len(sent) > 50 and requests > 2_000
    assert {"POST /replica/call", "GET /replica/watch", "POST /studies/{name}/news"} <= sent.keys()
