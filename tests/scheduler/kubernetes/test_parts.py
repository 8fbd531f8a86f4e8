"""Settings, certificates, placeholders, tokens and cleaning up: the small parts of a cluster's scheduler."""

from __future__ import annotations

import base64
import datetime
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from scheduler.api.tokens import Access
from scheduler.kubernetes.admission import make_certificate, shared_certificate, trust
from scheduler.kubernetes.clean import clean
from scheduler.kubernetes.placeholders import Placeholders, autoscaler_from, difference, placeholder
from scheduler.kubernetes.server import shared_tokens
from scheduler.snapshot import NodeView, Snapshot, TrialView
from tests.support.fake_cluster import FakeClusterApi
from trials.errors import InvalidClusterSettings
from trials.kubernetes.client.api import SECRETS, STUDIES, TRIALS, WEBHOOKS
from trials.kubernetes.names import FINALIZER
from trials.kubernetes.settings import ClusterSettings, read_settings, settings_from

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)


# ---------------------------------------------------------------------- settings


def test_settings_are_read_as_the_chart_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text('namespace: lab\nslot: {"nvidia.com/gpu": 1, cpu: 500m}\nmostSlots: null\nnamespaces: [a, lab]\n')
    settings = read_settings(path)
    assert settings.slot == {"nvidia.com/gpu": "1", "cpu": "500m"}
    assert settings.all_namespaces == ("lab", "a")
    assert settings.most_slots is None


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"slots": 3}, "'slots' is not known"),
        ({"slot": {}}, "slot is empty"),
        ({"slot": {"cpu": "much"}}, "slot.cpu is 'much'"),
        ({"slot": {"cpu": 0}}, "slot.cpu is '0'"),
        ({"startDeadlineSeconds": 0}, "must be above 0"),
        (["a"], "must map names to values"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(document: Any, words: str) -> None:
    with pytest.raises(InvalidClusterSettings, match=words):
        settings_from(document)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidClusterSettings, match=r"missing\.yaml"):
        read_settings(tmp_path / "missing.yaml")


# ---------------------------------------------------------------------- certificate and token


def test_the_certificate_is_for_its_names_and_a_server_can_use_it(tmp_path: Path) -> None:
    made = make_certificate(["webhook.lab.svc"], NOW)
    found = x509.load_pem_x509_certificate(made.certificate)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["webhook.lab.svc"]
    certificate, key = made.write(tmp_path / "tls")
    assert key.stat().st_mode & 0o077 == 0
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)


def test_all_pods_share_one_certificate_and_the_api_server_is_told_of_it() -> None:
    api = FakeClusterApi()
    api.create(SECRETS, "lab", {"metadata": {"name": "webhook"}})
    first = shared_certificate(api, "lab", "webhook", ["a"])
    assert shared_certificate(api, "lab", "webhook", ["a"]) == first
    hook = {"name": "h", "clientConfig": {"service": {"name": "webhook"}}}
    api.create(WEBHOOKS, None, {"metadata": {"name": "hooks"}, "webhooks": [hook]})
    trust(api, "hooks", first)
    told = api.get(WEBHOOKS, None, "hooks")["webhooks"][0]["clientConfig"]
    assert base64.b64decode(told["caBundle"]) == first.certificate
    assert told["service"] == {"name": "webhook"}
    calls = len(api.calls)
    trust(api, "hooks", first)
    assert [call[0] for call in api.calls[calls:]] == ["get"]


def test_the_token_is_made_once() -> None:
    api = FakeClusterApi()
    api.create(SECRETS, "lab", {"metadata": {"name": "token"}})
    tokens = shared_tokens(api, "lab", "token")
    assert len(tokens.owner) == 48
    again = shared_tokens(api, "lab", "token")
    assert (again.owner, again.for_replica("r")) == (tokens.owner, tokens.for_replica("r"))


def test_a_token_that_was_replaced_stays_so_for_the_next_scheduler() -> None:
    api = FakeClusterApi()
    api.create(SECRETS, "lab", {"metadata": {"name": "token"}})
    tokens = shared_tokens(api, "lab", "token")
    replica, owner, reader = tokens.for_replica("r"), tokens.owner, tokens.for_reading()
    assert tokens.replace(Access.OWNER) != owner
    assert tokens.replace(Access.READ) != reader
    again = shared_tokens(api, "lab", "token")
    assert (again.owner, again.for_reading()) == (tokens.owner, tokens.for_reading())
    assert again.for_replica("r") == replica


# ---------------------------------------------------------------------- placeholders


@pytest.mark.parametrize(
    ("wanted", "present", "more", "fewer"),
    [(2, [], 2, []), (2, ["a"], 1, []), (1, ["b", "a"], 0, ["b"]), (-1, ["a"], 0, ["a"]), (0, [], 0, [])],
)
def test_as_many_placeholders_as_nodes_are_missing(
    wanted: int, present: list[str], more: int, fewer: list[str]
) -> None:
    assert difference(wanted, present) == (more, fewer)


SCALING = ClusterSettings(
    image="i:1",
    slot={"nvidia.com/gpu": "1", "cpu": "500m"},
    placeholders={"slotsPerNode": 4, "mostNodes": 3, "template": {"spec": {"nodeSelector": {"pool": "gpu"}}}},
)


def test_a_placeholder_is_as_large_as_a_nodes_slots() -> None:
    spec = placeholder(SCALING, "x", ["b", "a"])["spec"]
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["a", "b"]}]
    assert spec["containers"][0]["resources"]["requests"] == {"nvidia.com/gpu": "4", "cpu": "2"}
    assert spec["nodeSelector"] == {"pool": "gpu"}


def test_nodes_are_asked_for_while_trials_wait_and_not_afterwards() -> None:
    api = FakeClusterApi()
    pods = lambda: [document for (plural, _, _), document in api.objects.items() if plural == "pods"]  # noqa: E731
    placeholders = Placeholders(api, SCALING, pods, list)
    waiting = tuple(
        TrialView(trial_id=f"t{index}", study="s", min_slots=1, max_slots=1, submitted_at=float(index))
        for index in range(8)
    )
    one = (NodeView(name="n", slots=4),)
    placeholders.adjust(Snapshot(now=0.0, nodes=one, trials=waiting), 0.0)
    assert len(pods()) == 1
    placeholders.adjust(Snapshot(now=1.0, nodes=one, trials=waiting), 1.0)
    assert len(pods()) == 1
    two = (*one, NodeView(name="m", slots=4))
    placeholders.adjust(Snapshot(now=2.0, nodes=two, trials=waiting), 2.0)
    assert pods() == []


def test_without_placeholders_no_node_is_asked_for_and_wrong_ones_are_named() -> None:
    assert autoscaler_from(ClusterSettings()) is None
    with pytest.raises(InvalidClusterSettings, match=r"placeholders\.nodes is not a setting"):
        autoscaler_from(ClusterSettings(placeholders={"nodes": 3}))
    with pytest.raises(InvalidClusterSettings, match=r"placeholders\.mostNodes is 'many'"):
        autoscaler_from(ClusterSettings(placeholders={"mostNodes": "many"}))


# ---------------------------------------------------------------------- cleaning up


def test_cleaning_up_leaves_nothing_even_without_a_scheduler() -> None:
    api = FakeClusterApi()
    spec = {"command": ["x"]}
    api.create(TRIALS, "lab", {"metadata": {"name": "t", "finalizers": [FINALIZER]}, "spec": spec})
    api.create(TRIALS, "team", {"metadata": {"name": "u"}, "spec": spec})
    api.create(STUDIES, "lab", {"metadata": {"name": "s"}})
    clean(api, ("lab", "team"), wait_seconds=0.0)
    assert api.objects == {}
