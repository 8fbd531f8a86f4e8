"""What a replica's pod looks like, and what is read from one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dist_core.link.environment import SLOT_MEMORY
from tests.support.cluster_objects import pod, request
from trials.kubernetes.pods.manifest import merge_templates, pod_manifest, touches_ours
from trials.kubernetes.pods.status import is_stuck, read_end
from trials.kubernetes.settings import ClusterSettings, Owner

OWNER = Owner(trial_id="t-0", name="t-0", namespace="team", uid="u", study="my study!")
SETTINGS = ClusterSettings(slot={"nvidia.com/gpu": "1", "cpu": "2"}, image="cluster:1")


def variables(manifest: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in manifest["spec"]["containers"][0]["env"]}


def test_a_replica_asks_for_its_slot_on_its_node_and_never_restarts() -> None:
    manifest = pod_manifest(request(), OWNER, SETTINGS)
    spec = manifest["spec"]
    (container,) = spec["containers"]
    assert container["resources"] == {
        "requests": {"nvidia.com/gpu": "1", "cpu": "2"},
        "limits": {"nvidia.com/gpu": "1"},
    }
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    assert manifest["metadata"]["namespace"] == "team"
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == "u"
    found = variables(manifest)
    assert found["ELASTUNE_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert found["MINE"] == "1"
    assert json.loads(found["ELASTUNE_START"])["entrypoint"] == "m:f"


@pytest.mark.parametrize(
    ("given", "requests", "limits"),
    [
        ({"limits": {"memory": "2Gi"}}, {"memory": "2Gi"}, {"memory": "2Gi"}),
        ({"requests": {"memory": "2Gi", "cpu": "1"}}, {"memory": "2Gi", "cpu": "1"}, {"memory": "2Gi"}),
        ({"requests": {"nvidia.com/gpu": "0"}}, {"nvidia.com/gpu": "0"}, {"nvidia.com/gpu": "0"}),
    ],
)
def test_a_template_may_name_a_request_or_a_limit_alone(
    given: dict[str, Any], requests: dict[str, str], limits: dict[str, str]
) -> None:
    template = {"spec": {"containers": [{"name": "replica", "resources": given}]}}
    owner = Owner("t-0", "t-0", "n", "u", "s", templates=(template,))
    found = pod_manifest(request(), owner, SETTINGS)["spec"]["containers"][0]["resources"]
    assert found["requests"] == {"nvidia.com/gpu": "1", "cpu": "2", **requests}
    assert found["limits"] == {"nvidia.com/gpu": "1", **limits}


def test_a_replica_is_told_of_the_memory_that_its_pod_really_has() -> None:
    def told(**container: Any) -> list[str]:
        template = {"spec": {"containers": [{"name": "replica", **container}]}}
        owner = replace(OWNER, templates=(template,))
        env = pod_manifest(request(), owner, SETTINGS)["spec"]["containers"][0]["env"]
        return [each["value"] for each in env if each["name"] == SLOT_MEMORY]

    assert told() == []
    assert told(resources={"limits": {"memory": "2Gi"}}) == [str(2 << 30)]
    assert told(resources={"limits": {"memory": "2Gi"}}, env=[{"name": SLOT_MEMORY, "value": "7"}]) == ["7"]


def test_a_replica_sees_its_own_trials_checkpoints_and_its_studys_data_only() -> None:
    """The volume has those of all trials, their packed code and what they printed."""
    volume = {"persistentVolumeClaim": {"claimName": "c"}}
    shared = ClusterSettings(slot={"cpu": "1"}, image="i:1", volume=volume)
    spec = pod_manifest(request(), OWNER, shared)["spec"]
    folder, data = "/var/lib/elastune/checkpoints/t-0", "/var/lib/elastune/prepared/s-0"

    def mounted(spec: dict[str, Any]) -> list[dict[str, Any]]:
        mounts = spec["containers"][0]["volumeMounts"]
        return [each for each in mounts if each.pop("name") == "elastune-state"]

    assert mounted(spec) == [
        {"mountPath": folder, "subPath": "checkpoints/t-0"},
        {"mountPath": data, "subPath": "prepared/s-0"},
    ]
    own = pod_manifest(request(), OWNER, SETTINGS)["spec"]
    assert mounted(own) == [{"mountPath": folder}, {"mountPath": data, "subPath": "prepared"}]
    everything = {"name": "elastune-state", "mountPath": "/all"}
    for template in (
        {"spec": {"containers": [{"name": "replica", "volumeMounts": [everything]}]}},
        {"spec": {"initContainers": [{"name": "x", "volumeMounts": [everything]}]}},
        {"spec": {"volumes": [{"name": "elastune-code", "hostPath": {"path": "/"}}]}},
    ):
        assert "are reserved" in (touches_ours((template,)) or "")
    assert touches_ours(({"spec": {"volumes": [{"name": "data", "emptyDir": {}}]}}, {})) is None


def test_no_token_stands_in_a_pod() -> None:
    """Who may look at pods would have it; the kubelet gives the pod one of its own, for this scheduler alone."""
    asked = replace(request(), environ={**request().environ, "ELASTUNE_REPLICA_TOKEN": "secret of this replica"})
    manifest = pod_manifest(asked, OWNER, SETTINGS)
    assert "secret of this replica" not in json.dumps(manifest)
    assert "ELASTUNE_REPLICA_TOKEN" not in variables(manifest)
    file = variables(manifest)["ELASTUNE_REPLICA_TOKEN_FILE"]
    [mount] = [
        each
        for each in manifest["spec"]["containers"][0]["volumeMounts"]
        if file == f"{each['mountPath']}/token" and each["readOnly"]
    ]
    [volume] = [each for each in manifest["spec"]["volumes"] if each["name"] == mount["name"]]
    [source] = volume["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "elastune.default.elastune.dev"


def test_every_label_is_one_that_kubernetes_takes() -> None:
    labels = pod_manifest(request(), OWNER, SETTINGS)["metadata"]["labels"]
    assert all(len(value) <= 63 and value[0].isalnum() and " " not in value for value in labels.values())
    assert labels["elastune.dev/slot"] == "2"


def test_the_image_of_the_trial_comes_before_the_studys_and_the_clusters() -> None:
    def image(trial: str = "", study: str = "", template: dict[str, Any] | None = None) -> str:
        owner = Owner("t-0", "t-0", "n", "u", "s", templates=(template or {},), image=study)
        found = pod_manifest(request(image=trial), owner, SETTINGS)["spec"]["containers"][0]["image"]
        assert isinstance(found, str)
        return found

    template = {"spec": {"containers": [{"name": "replica", "image": "template:1"}]}}
    assert image() == "cluster:1"
    assert image(study="study:1") == "study:1"
    assert image(study="study:1", template=template) == "template:1"
    assert image("trial:1", "study:1", template) == "trial:1"


def test_a_packed_folder_goes_where_it_was() -> None:
    spec = pod_manifest(request(package="a" * 64), OWNER, SETTINGS)["spec"]
    mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    assert mounts["elastune-code"] == "/home/me/project"
    assert {"name": "elastune-code", "emptyDir": {}} in spec["volumes"]
    plain = pod_manifest(request(), OWNER, SETTINGS)["spec"]
    assert "elastune-code" not in {each["name"] for each in plain["volumes"]}


def test_templates_add_to_each_other() -> None:
    below = {
        "spec": {
            "containers": [{"name": "replica", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]}],
            "tolerations": [{"key": "x"}],
            "volumes": [{"name": "data", "emptyDir": {}}],
        }
    }
    above = {
        "spec": {
            "containers": [{"name": "replica", "env": [{"name": "B", "value": "2"}]}, {"name": "side", "image": "s"}],
            "tolerations": [{"key": "y"}],
            "nodeSelector": {"zone": "a"},
        }
    }
    merged = merge_templates(below, above)["spec"]
    assert merged["containers"][0]["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    assert [each["name"] for each in merged["containers"]] == ["replica", "side"]
    assert merged["tolerations"] == [{"key": "x"}, {"key": "y"}]
    assert merged["volumes"] == [{"name": "data", "emptyDir": {}}]
    assert below["spec"]["tolerations"] == [{"key": "x"}]


def test_the_suites_own_variables_win_over_a_templates() -> None:
    template = {"spec": {"containers": [{"name": "replica", "env": [{"name": "ELASTUNE_API", "value": "evil"}]}]}}
    owner = Owner("t-0", "t-0", "n", "u", "s", templates=(template,))
    names = [each["name"] for each in pod_manifest(request(), owner, SETTINGS)["spec"]["containers"][0]["env"]]
    assert names.count("ELASTUNE_API") == 1
    assert variables(pod_manifest(request(), owner, SETTINGS))["ELASTUNE_API"] == "http://10.0.0.1:7300"


@pytest.mark.parametrize(("spec", "seconds"), [({}, 60), ({"terminationGracePeriodSeconds": 300}, 300)])
def test_a_replica_knows_the_grace_of_its_pod(spec: dict[str, Any], seconds: int) -> None:
    owner = Owner("t-0", "t-0", "n", "u", "s", templates=({"spec": spec},))
    manifest = pod_manifest(request(), owner, SETTINGS)
    assert manifest["spec"]["terminationGracePeriodSeconds"] == seconds
    assert variables(manifest)["ELASTUNE_GRACE_SECONDS"] == str(seconds)


def test_a_trial_that_must_not_be_moved_says_so_to_autoscalers() -> None:
    owner = Owner("t-0", "t-0", "n", "u", "s", preemptible=False, queue="team-queue")
    metadata = pod_manifest(request(), owner, SETTINGS)["metadata"]
    assert metadata["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"


def test_affinity_of_a_template_is_kept_beside_the_node() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}
    template = {"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}}
    owner = Owner("t-0", "t-0", "n", "u", "s", templates=(template,))
    found = pod_manifest(request(), owner, SETTINGS)["spec"]["affinity"]["nodeAffinity"]
    (term,) = found["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [zone]
    assert term["matchFields"][0]["values"] == ["n1"]


CREATED = 1767225600.0
"""2026-01-01T00:00:00Z."""


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"containerStatuses": [{"name": "replica", "state": {"terminated": {"exitCode": code, "reason": reason}}}]}


@pytest.mark.parametrize(
    ("phase", "status", "expected"),
    [
        ("Succeeded", ended(0), (0, "pod_ended")),
        ("Failed", ended(75), (75, "pod_ended")),
        ("Failed", ended(143), (143, "pod_ended")),
        ("Failed", ended(139), (-11, "pod_ended")),
        ("Failed", ended(137, "OOMKilled"), (-9, "out_of_memory")),
        ("Failed", {"reason": "Evicted", "message": "low on memory"}, (None, "evicted")),
        ("Failed", {"reason": "OutOfnvidia.com/gpu", "message": "none left"}, (None, "no_room")),
        ("Failed", {"reason": "NodeAffinity", "message": "changed"}, (None, "cannot_start")),
    ],
)
def test_how_a_replica_ended(phase: str, status: dict[str, Any], expected: tuple[int | None, str]) -> None:
    end = read_end(pod("r", "n1", phase=phase, **status), CREATED + 5, node_is_lost=False, deadline_seconds=60.0)
    assert end is not None
    wanted_status, wanted_code = expected
    assert end.status == wanted_status
    assert end.code == wanted_code or not end.why


def end_of_waiting(age: float, reason: str) -> Any:
    waiting = {"state": {"waiting": {"reason": reason, "message": "says why"}}, "name": "replica"}
    document = pod("r", "n1", phase="Pending", containerStatuses=[waiting])
    return read_end(document, CREATED + age, node_is_lost=False, deadline_seconds=60.0)


def test_a_pod_that_cannot_start_is_given_up_after_the_deadline() -> None:
    assert end_of_waiting(59.0, "ImagePullBackOff") is None
    end = end_of_waiting(61.0, "ImagePullBackOff")
    assert end.code == "cannot_start"
    assert "ImagePullBackOff: says why" in end.why


def test_one_that_no_patience_helps_is_given_up_sooner() -> None:
    assert end_of_waiting(4.0, "ErrImageNeverPull") is None
    assert end_of_waiting(6.0, "ErrImageNeverPull").code == "cannot_start"


@pytest.mark.parametrize(
    ("states", "stuck"),
    [
        ([{"waiting": {"reason": "ErrImageNeverPull"}}], True),
        ([{"waiting": {"reason": "ImagePullBackOff"}}, {"running": {}}], False),
        ([{"waiting": {"reason": "ImagePullBackOff"}}, {"waiting": {"reason": "ContainerCreating"}}], False),
        ([{"waiting": {"reason": "ContainerCreating"}}], False),
        ([{"terminated": {"exitCode": 1}}], False),
        ([], False),
    ],
)
def test_what_waits_for_its_image_has_nothing_to_end(states: list[dict[str, Any]], stuck: bool) -> None:
    statuses = [{"name": f"c{index}", "state": state} for index, state in enumerate(states)]
    assert is_stuck(pod("r", "n1", phase="Pending", containerStatuses=statuses)) is stuck


def test_one_that_the_cluster_cannot_place_tells_why() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes fit"}
    document = pod("r", "n1", phase="Pending", conditions=[condition])
    end = read_end(document, CREATED + 61, node_is_lost=False, deadline_seconds=60.0)
    assert end is not None
    assert "Unschedulable: 0/2 nodes fit" in end.why
    assert end.code == "no_room"


def test_a_node_that_does_not_answer_takes_its_replicas_with_it() -> None:
    running = pod("r", "n1")
    assert read_end(running, CREATED, node_is_lost=False, deadline_seconds=60.0) is None
    end = read_end(running, CREATED, node_is_lost=True, deadline_seconds=60.0)
    assert end is not None
    assert (end.code, end.why) == ("node_lost", "node n1 no longer answers")
