"""A real cluster for tests: installs the chart with the real Helm engine, and looks at things with kubectl.

KUBECONFIG names the cluster, which has two nodes with four nvidia.com/gpu each. On one that has images
ELASTUNE_TEST_IMAGE names this project's; else the machine's own files are mounted into pods that have an empty image
(ELASTUNE_TEST_HOST_IMAGE), the interpreter of this environment among them. ELASTUNE_TEST_CLUSTER may name a command
that kills nodes: ``COMMAND stop-node N``, ``start-node N``.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm

from scheduler.client.connection import SchedulerClient
from scheduler.errors import SchedulerUnreachable
from tests.support import waiting
from tests.support.ports import ReservedPort, until_it_answers
from tests.support.project import ROOT
from trials.kubernetes.client.api import NODES, PODS, QUOTAS, SECRETS, SERVICES, STUDIES, TRIALS, KubernetesApi
from tuner_bridge.driving.sent_code import pack

CHART = ROOT / "deploy" / "helm" / "elastune"
CODE = Path(__file__).parent / "code"
"""What trials on the cluster run."""
NAMESPACE = "elastune-test"
RELEASE = "elastune"
TEAM = f"{NAMESPACE}-team"
"""Another namespace, of people who share the scheduler."""
HOST_FOLDERS = ("usr", "lib", "lib64", "bin", "root", "home", "work", "opt", "tmp")
"""Of the machine; what the interpreter and this project need lies below some of them."""


def kubectl(*words: str, check: bool = True, text: str | None = None) -> str:
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True, input=text, timeout=60)
    if check and done.returncode:
        raise AssertionError(f"kubectl {' '.join(words)}: {done.stderr}")
    return done.stdout if check else done.stdout + done.stderr


KINDS = {kind.plural: kind for kind in (PODS, NODES, QUOTAS, SECRETS, SERVICES, TRIALS, STUDIES)}


@functools.cache
def api() -> KubernetesApi:
    """For what is looked at again and again: a `kubectl` each time costs a tenth of a second of the processor."""
    return KubernetesApi.connect()


def objects(kind: str, name: str = "", *, labels: str = "", namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """All of a kind, those with some labels, or one by name."""
    where = None if kind == NODES.plural else namespace
    if name:
        return [dict(api().get(KINDS[kind], where, name))]
    return list(api().list(KINDS[kind], where, labels)["items"])


def gpu_nodes() -> list[str]:
    nodes = [each for each in objects("nodes") if "nvidia.com/gpu" in each["status"]["allocatable"]]
    return sorted(each["metadata"]["name"] for each in nodes)


def named(kind: str, name: str) -> dict[str, Any]:
    return next((each for each in objects(kind) if each["metadata"]["name"] == name), {})


def until(what: Callable[[], Any], seconds: float, words: str) -> Any:
    """The first true value of ``what``; fails with ``words`` when there is none in time."""
    return waiting.until(what, seconds, lambda: f"{words}\n{state()}")


def log_of(client: SchedulerClient, trial_id: str) -> str:
    """What the only replica of a trial printed that is over.

    The trial ends with its replica's word; its log is there when the kubelet has told that it has run.
    """
    (log,) = until(lambda: client.request("GET", f"/trials/{trial_id}/log"), 15.0, "its log is there")
    return str(log["words"])


def state() -> str:
    """What a person would look at first."""
    looks = [
        kubectl("-n", NAMESPACE, "get", "trials,pods", "-o", "wide", check=False),
        kubectl("-n", NAMESPACE, "logs", "-l", "app.kubernetes.io/component=scheduler", "--tail=30", check=False),
    ]
    return "\n".join(looks)


def values(state_dir: Path, **changes: Any) -> dict[str, Any]:
    """For the chart, on this cluster."""
    image = os.environ.get("ELASTUNE_TEST_IMAGE")
    slot = {"nvidia.com/gpu": 1, "cpu": "100m", "memory": None}
    scheduler = dict(changes.pop("scheduler", {}))
    if image is not None:
        repository, _, tag = image.rpartition(":")
        given = {"image": {"repository": repository, "tag": tag}, "slot": slot, "storage": {"enabled": False}}
        return {**given, "scheduler": scheduler, "replicas": {"startDeadlineSeconds": 20}, **changes}
    repository, _, tag = os.environ.get("ELASTUNE_TEST_HOST_IMAGE", "docker.io/local/host:1").rpartition(":")
    folders = [name for name in HOST_FOLDERS if (Path("/") / name).is_dir()]
    volumes = [{"name": name, "hostPath": {"path": f"/{name}"}} for name in folders]
    volumes.append({"name": "certificates", "hostPath": {"path": "/etc/ssl"}})
    mounts: list[dict[str, Any]] = [{"name": name, "mountPath": f"/{name}", "readOnly": True} for name in folders]
    mounts.append({"name": "certificates", "mountPath": "/etc/ssl", "readOnly": True})
    without_tmp = [each for each in mounts if each["name"] != "tmp"]
    for number, folder in enumerate(beyond(folders)):
        volumes.append({"name": f"project-{number}", "hostPath": {"path": str(folder)}})
        without_tmp.append({"name": f"project-{number}", "mountPath": str(folder), "readOnly": True})
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    environ = [{"name": "PATH", "value": path}, {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}]
    as_root = {"runAsUser": 0, "runAsGroup": 0}
    replica = {
        "name": "replica",
        "imagePullPolicy": "Never",
        "env": [*environ, {"name": "OMP_NUM_THREADS", "value": "1"}],
        "volumeMounts": [*without_tmp, {"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "slot": slot,
        "scheduler": {
            "extraEnv": [*environ, *scheduler.pop("extraEnv", [])],
            "extraVolumes": [each for each in volumes if each["name"] != "tmp"],
            "extraVolumeMounts": without_tmp,
            "resources": {"requests": {"cpu": "50m"}, "limits": {"memory": "1Gi"}},
            **scheduler,
        },
        "storage": {"volume": {"hostPath": {"path": str(state_dir), "type": "DirectoryOrCreate"}}},
        "podSecurityContext": {**as_root, "runAsNonRoot": False},
        "replicas": {
            "startDeadlineSeconds": 20,
            "template": {
                "spec": {
                    "securityContext": as_root,
                    "dnsPolicy": "Default",
                    "containers": [replica],
                    "volumes": [each for each in volumes if each["name"] != "tmp"] + [{"name": "tmp", "emptyDir": {}}],
                }
            },
        },
        **changes,
    }


def beyond(folders: Sequence[str]) -> list[Path]:
    """Folders with this project and its interpreter that lie in none of those of the machine that pods see."""
    seen = [Path("/") / name for name in folders if name != "tmp"]
    needed = {ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    missing = sorted(path for path in needed if not any(path.is_relative_to(each) for each in seen))
    return [path for path in missing if not any(path != other and path.is_relative_to(other) for other in missing)]


@dataclass(slots=True)
class Installed:
    state_dir: Path
    token: str
    url: str

    def client(self) -> SchedulerClient:
        return SchedulerClient(self.url, self.token)

    def code(self) -> str:
        """Digest of that folder as the scheduler keeps it, for trials that run what is in it."""
        package = pack(CODE)
        client = self.client()
        client.send(f"/packages/{package.digest}", package.content)
        client.close()
        return package.digest

    def environ(self) -> dict[str, str]:
        return {**os.environ, "ELASTUNE_URL": self.url, "ELASTUNE_TOKEN": self.token, "OMP_NUM_THREADS": "1"}

    def sweep(self, *words: str, folder: Path, **environ: str) -> str:
        """What a script of ``folder`` prints that runs on this machine, and has its trials on the cluster."""
        sweep = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env={**self.environ(), **environ},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert sweep.returncode == 0, sweep.stderr
        return sweep.stdout

    def answers(self) -> bool:
        client = self.client()
        try:
            client.request("GET", "/overview")
        except SchedulerUnreachable:
            return False
        finally:
            client.close()
        return True

    def leader(self) -> str:
        """Name of the scheduler's pod that leads, once it answers."""

        def leads() -> str | None:
            pods = [pod for pod in objects("pods", labels="elastune.dev/leader=true") if is_running(pod)]
            return str(pods[0]["metadata"]["name"]) if len(pods) == 1 else None

        return str(until(leads, 60.0, "one scheduler leads"))


def is_running(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")


@contextmanager
def installed(state_dir: Path, **changes: Any) -> Iterator[Installed]:
    """The chart on the cluster, and afterwards what it was before."""
    until(lambda: not is_terminating(NAMESPACE), 120.0, "the namespace of the last installation is gone")
    engine = helm.Config(namespace=NAMESPACE, kubeconfig_path=os.environ["KUBECONFIG"])
    try:
        engine.install(
            CHART,
            RELEASE,
            values(state_dir, **changes),
            namespace=NAMESPACE,
            create_namespace=True,
            wait="watcher",
            timeout=120,
        )
        secret = until(lambda: named("secrets", "elastune-token").get("data"), 60.0, "the scheduler made its token")
        service = named("services", "elastune")
        token = base64.b64decode(secret["token"]).decode()
        with reachable(service) as url:
            made = Installed(state_dir, token, url)
            made.leader()
            # The service leads to it a moment after it was marked.
            until(made.answers, 30.0, "the API answers")
            yield made
    finally:
        engine.uninstall(RELEASE, wait="watcher", timeout=180, ignore_not_found=True)
        engine.close()


def is_terminating(namespace: str) -> bool:
    """Tell whether a namespace is being deleted: it takes nothing in, and cannot be made again until it is gone."""
    phases = kubectl("get", "namespace", namespace, "-o", "jsonpath={.status.phase}", "--ignore-not-found")
    return phases == "Terminating"


def beside_the_nodes_to_kill() -> dict[str, Any]:
    """The chart's value that keeps the scheduler off the node that tests kill."""
    if "ELASTUNE_TEST_CLUSTER" not in os.environ:
        return {}
    return {"nodeSelector": {"kubernetes.io/hostname": "kube-node-1"}}


@contextmanager
def reachable(service: dict[str, Any]) -> Iterator[str]:
    """An address of the API for this process: the service's own where the cluster runs here, else forwarded."""
    if os.environ.get("ELASTUNE_TEST_IMAGE") is None:
        yield f"http://{service['spec']['clusterIP']}:7300"
        return
    # It leads to one pod, and ends with it: again to the next one.
    with ReservedPort() as port:
        again = f"while :; do kubectl -n {NAMESPACE} port-forward service/elastune {port}:7300; sleep 0.5; done"
        forward = subprocess.Popen(["bash", "-c", again], start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            until_it_answers(f"http://127.0.0.1:{port}/healthz")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(forward.pid, signal.SIGTERM)
            forward.wait()


def node_command(*words: str) -> None:
    """Kill a node, or bring it back."""
    subprocess.run([os.environ["ELASTUNE_TEST_CLUSTER"], *words], check=True, timeout=120, capture_output=True)


def replicas_of(trial: str) -> list[dict[str, Any]]:
    return [pod for pod in objects("pods", labels=f"elastune.dev/trial={trial}") if is_running(pod)]


def apply(document: dict[str, Any]) -> None:
    kubectl("apply", "-f", "-", text=json.dumps(document))


def stranger(name: str, gpus: int, **spec: Any) -> None:
    """Somebody else's pod, which does nothing with what it requests."""
    image = os.environ.get("ELASTUNE_TEST_IMAGE")
    main = {
        "name": "main",
        "image": image or "docker.io/local/pause:1",
        "imagePullPolicy": "IfNotPresent",
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        **({} if image is None else {"command": ["python", "-c", "import signal; signal.pause()"]}),
    }
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"elastune-test": "stranger"}}
    whole = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [main], **spec}
    apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole})


def trial_document(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "elastune.dev/v1",
        "kind": "Trial",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }


def status(name: str) -> dict[str, Any]:
    found = [trial for trial in objects("trials") if trial["metadata"]["name"] == name]
    return dict(found[0].get("status") or {}) if found else {}


def steady(cluster: Installed, name: str, epochs: int = 400, *, how: str = "", **spec: Any) -> None:
    """A trial whose code travels packed, as a sweep's does."""
    environ = {"EPOCHS": str(epochs), "STEP_SECONDS": "0.02", **({"HOW": how} if how else {})}
    command = ["python", "/code/steady.py"]
    apply(trial_document(name, command=command, env=environ, workingDir="/code", package=cluster.code(), **spec))


def delete(*names: str) -> None:
    kubectl("-n", NAMESPACE, "delete", "trial", *names, "--timeout=60s")
    for name in names:
        until(lambda name=name: not replicas_of(name), 30.0, f"the pods of {name} are gone")  # type: ignore[misc]


def printed(pod: str) -> list[dict[str, Any]]:
    """What a replica said after each epoch."""
    lines = api().log(NAMESPACE, pod, most_bytes=1 << 20).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def running(name: str, replicas: int, seconds: float = 180.0) -> None:
    until(lambda: status(name).get("replicas") == replicas, seconds, f"{name} trains on {replicas} replicas")


def left_behind() -> str:
    """Anything of ours that an uninstallation should have taken along."""
    until(lambda: not objects("pods", labels="app.kubernetes.io/name=elastune-replica"), 60.0, "all replicas are gone")
    mine = (
        "deployments,services,configmaps,secrets,roles,rolebindings,serviceaccounts,leases,jobs,persistentvolumeclaims"
    )
    named = kubectl("-n", NAMESPACE, "get", mine, "-o", "name").split()
    wide = kubectl("get", "crds,clusterroles,clusterrolebindings,validatingwebhookconfigurations", "-o", "name").split()
    return " ".join(name for name in (*named, *wide) if "elastune" in name)


def schedulers() -> dict[str, int]:
    """The pods that there are and stay, and how often each one's process was restarted."""
    return {
        pod["metadata"]["name"]: sum(each["restartCount"] for each in pod["status"].get("containerStatuses") or ())
        for pod in objects("pods", labels="app.kubernetes.io/component=scheduler")
        if "deletionTimestamp" not in pod["metadata"]
    }


def goes_on(replicas: set[str]) -> None:
    """The trial of these replicas trains on, with them and in the same processes."""
    (one, *_) = sorted(replicas)
    count = len(printed(one))
    until(lambda: len(printed(one)) > count + 2, 30.0, "the trial trains on")
    assert len({each["pid"] for each in printed(one)}) == 1


def tidy() -> None:
    """Whatever a test that failed has left: the next one begins with an empty cluster."""
    kubectl("-n", NAMESPACE, "delete", "trials", "--all", "--timeout=50s", check=False)
    kubectl(
        "-n", NAMESPACE, "delete", "pods", "-l", "elastune-test=stranger", "--grace-period=0", "--force", check=False
    )
    kubectl("-n", NAMESPACE, "delete", "resourcequotas", "--all", check=False)
    if "ELASTUNE_TEST_CLUSTER" in os.environ:
        for number, name in enumerate(gpu_nodes(), start=1):
            kubectl("uncordon", name, check=False)
            if not comes_back(name):
                node_command("start-node", str(number))


def comes_back(node: str, seconds: float = 40.0) -> bool:
    """Whether it is ready, or is being started: a second start would leave the first one's processes to nobody."""
    deadline = time.monotonic() + seconds
    while not is_ready(node):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def is_ready(node: str) -> bool:
    conditions = named("nodes", node)["status"]["conditions"]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
