"""The chart, rendered by the real Helm engine: complete, with least rights, and the same as the plain manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from dist_core.version import __version__
from scripts.render_manifests import CHART, TARGET, TRIALS, rendered, with_the_fields_of_a_trial
from trials.kubernetes.names import Document
from trials.kubernetes.settings import settings_from


def render(**values: Any) -> list[Document]:
    chart = helm.Chart.load(CHART)
    documents: list[Document] = []
    for text in chart.render(values, name="elastune", namespace="lab").values():
        documents += [each for each in yaml.safe_load_all(text) if isinstance(each, dict) and "kind" in each]
    chart.close()
    return documents


def one(documents: list[Document], kind: str, name: str | None = None) -> Document:
    (found,) = [each for each in documents if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


def settings_in(documents: list[Document]) -> Any:
    return settings_from(yaml.safe_load(one(documents, "ConfigMap", "elastune")["data"]["cluster.yaml"]))


EVERYTHING: Document = {
    "scheduler": {"replicas": 2, "priorityClassName": "high", "tolerations": [{"key": "x", "operator": "Exists"}]},
    "namespaces": ["team-a", "team-b"],
    "storage": {"volume": {"nfs": {"server": "s", "path": "/p"}}},
    "image": {"pullSecrets": [{"name": "pull"}]},
    "podDisruptionBudget": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "serviceMonitor": {"enabled": True},
    "grafanaDashboard": {"enabled": True},
    "autoscaling": {"enabled": True},
}


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_helm_finds_nothing_wrong_with_it(values: Document) -> None:
    found = helm.lint(CHART, values, namespace="lab", strict=True)
    assert found["errors"] == []
    assert [each for each in found["messages"] if each["severity"] > 1] == []


def test_the_defaults_are_an_installation_that_the_scheduler_understands() -> None:
    documents = render()
    settings = settings_in(documents)
    assert (settings.namespace, settings.image) == ("lab", "elastune:0.1.0")
    assert settings.slot == {"nvidia.com/gpu": "1", "cpu": "1", "memory": "4Gi"}
    assert settings.volume == {"persistentVolumeClaim": {"claimName": "elastune-state"}}
    assert settings.keep_ended_seconds == 7 * 24 * 3600
    assert one(documents, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_all_options_are_understood_too() -> None:
    documents = render(**EVERYTHING)
    settings = settings_in(documents)
    assert settings.all_namespaces == ("lab", "team-a", "team-b")
    assert settings.placeholders["template"]["spec"]["priorityClassName"] == "elastune-lab-placeholder"
    assert settings.template["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    assert {each["metadata"]["namespace"] for each in documents if each["kind"] == "Role"} == {
        "lab",
        "team-a",
        "team-b",
    }
    assert json.loads(one(documents, "ConfigMap", "elastune-dashboard")["data"]["elastune.json"])["panels"]
    assert one(documents, "ServiceMonitor")["spec"]["endpoints"][0]["path"] == "/metrics"
    assert one(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_the_scheduler_may_do_what_it_does_and_nothing_else() -> None:
    documents = render()
    cluster_wide = one(documents, "ClusterRole")["rules"]
    assert {verb for rule in cluster_wide[:1] for verb in rule["verbs"]} == {"list", "watch"}
    for rule in [rule for each in documents if each["kind"] in ("Role", "ClusterRole") for rule in each["rules"]]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if {"secrets", "services", "leases", "validatingwebhookconfigurations"}.intersection(rule["resources"]):
            assert rule["resourceNames"], rule
        if "tokenreviews" in rule["resources"]:
            assert rule["verbs"] == ["create"]
        if "nodes" in rule["resources"]:
            assert rule["verbs"] == ["list", "watch"]


def test_the_scheduler_runs_without_any_privilege_and_says_how_it_is() -> None:
    pod = one(render(), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] == "/healthz"


def test_everything_is_known_to_kubernetes_1_20() -> None:
    known = {
        "v1",
        "apps/v1",
        "batch/v1",
        "rbac.authorization.k8s.io/v1",
        "apiextensions.k8s.io/v1",
        "admissionregistration.k8s.io/v1",
        "coordination.k8s.io/v1",
        "networking.k8s.io/v1",
        "scheduling.k8s.io/v1",
        # By what the cluster itself offers, or what the user has installed.
        "policy/v1",
        "policy/v1beta1",
        "monitoring.coreos.com/v1",
    }
    assert {each["apiVersion"] for each in render(**EVERYTHING)} <= known


@pytest.mark.parametrize(
    ("storage", "volume"),
    [
        ({"enabled": False}, {"emptyDir": {}}),
        ({"existingClaim": "mine"}, {"persistentVolumeClaim": {"claimName": "mine"}}),
        ({"volume": {"nfs": {"server": "s", "path": "/p"}}}, {"nfs": {"server": "s", "path": "/p"}}),
    ],
)
def test_storage_is_the_users_choice(storage: Document, volume: Document) -> None:
    documents = render(storage=storage)
    assert settings_in(documents).volume == volume
    mounted = one(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "state", **volume} in mounted
    assert not [each for each in documents if each["kind"] == "PersistentVolumeClaim"]


def test_a_claim_of_one_namespace_is_not_promised_to_others() -> None:
    with pytest.raises(helm.HelmError, match="cannot mount the claim"):
        render(namespaces=["team-a"])


def test_health_is_asked_for_as_it_is_served() -> None:
    for enabled, scheme in ((True, "HTTPS"), (False, "HTTP")):
        pod = one(render(webhook={"enabled": enabled}), "Deployment")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["livenessProbe"]["httpGet"]["scheme"] == scheme
        assert any(word.startswith("--webhook-secret") for word in container["args"]) is enabled


def test_definitions_can_outlive_an_uninstallation() -> None:
    kept = [each for each in render(crds={"keep": True}) if each["kind"] == "CustomResourceDefinition"]
    assert {each["metadata"]["annotations"]["helm.sh/resource-policy"] for each in kept} == {"keep"}
    assert len(kept) == 2
    assert [each for each in render(crds={"keep": True}) if each["kind"] == "Job"] == []


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    definition = TRIALS.read_text()
    assert definition == with_the_fields_of_a_trial(definition), "old: run python -m scripts.render_manifests"
    for name, text in rendered().items():
        assert (TARGET / name).read_text() == text, f"{name} is old: run python -m scripts.render_manifests"


def test_both_resources_have_what_people_use_them_with() -> None:
    for path, short in ((CHART / "files" / "trials.yaml", "etr"), (CHART / "files" / "studies.yaml", "est")):
        document = yaml.safe_load(Path(path).read_text())
        names = document["spec"]["names"]
        (version,) = document["spec"]["versions"]
        assert (names["shortNames"], names["categories"]) == ([short], ["all", "elastune"])
        assert "status" in version["subresources"]
        assert version["additionalPrinterColumns"]


def test_the_chart_has_the_version_of_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
