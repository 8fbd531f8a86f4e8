"""A scheduler on a real API server with 1,000 running trials: what it writes, how long its looks take, how it answers.

Nodes and pods are objects of the API server that nobody stands behind: a stand-in for the kubelets calls the pods
running, one for the replicas reports and polls as they do. KUBECONFIG names a cluster that may be filled so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks.frame import Measurement
from scheduler.api.connections import raise_descriptor_limit
from scheduler.api.tokens import Tokens
from scheduler.client.connection import SchedulerClient
from trials.errors import ClusterRefused
from trials.kubernetes.client.api import NODES, PODS, Collection, KubernetesApi
from trials.kubernetes.settings import ClusterSettings
from trials.spec import TrialSpec

STUDIES = 10
TRIALS, STAND_IN_NODES = int(os.environ.get("ELASTUNE_TRIALS", "1000")), 8
SECONDS = float(os.environ.get("ELASTUNE_SECONDS", "60"))
REPORT_SECONDS = 10.0
MOST_WRITES = 50.0
"""A second: what one API server of a small cluster should bear of a single client."""
TICK_SECONDS = 1.0
DECISION_SECONDS = 6.0
"""One comes every five, and takes a moment."""
ANSWER_MS = 1000.0
"""Reports are told beside training: that delays nobody."""
NAMESPACES = Collection("/api/v1", "namespaces")
ROOT = Path(__file__).resolve().parents[1]


def cluster_settings(namespace: str, state: str) -> ClusterSettings:
    return ClusterSettings(
        namespace=namespace,
        instance="at-size",
        image="nowhere.invalid/x:1",
        node_selector={"elastune.dev/at-size": "true"},
        state_dir=state,
        start_deadline_seconds=600.0,
    )


def operate(namespace: str, state: str, port: int, token: str) -> None:
    """Run the scheduler in a child process, as in its pod."""
    from scheduler.kubernetes.server import Operator, OperatorSettings

    settings = OperatorSettings(
        cluster=cluster_settings(namespace, state),
        tokens=lambda: Tokens(token, fixed=True),
        host="127.0.0.1",
        port=port,
        webhook_port=port + 1,
        url=f"http://127.0.0.1:{port}",
    )
    Operator(KubernetesApi.connect(), settings).run()


def headers_of(tokens: Tokens, replica_id: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tokens.for_replica(replica_id)}", "X-Elastune-Replica": replica_id}


def stand_in(namespace: str, port: int, token: str) -> None:
    """Stand in for kubelets and replicas, in a child process, until it is ended."""
    # Each replica has two connections.
    raise_descriptor_limit()
    made = StandIns(KubernetesApi.connect(), namespace, f"http://127.0.0.1:{port}", Tokens(token))
    threading.Thread(target=made.be_kubelets, daemon=True).start()
    asyncio.run(made.be_replicas())


class StandIns:
    """Nodes that are ready, pods that run, replicas that report."""

    def __init__(self, api: KubernetesApi, namespace: str, url: str, tokens: Tokens) -> None:
        self._api = api
        self._namespace = namespace
        self._url = url
        self._tokens = tokens
        self._stopped = threading.Event()
        self._running: set[str] = set()

    def make(self) -> None:
        definitions = str(ROOT / "deploy" / "kustomize" / "definitions.yaml")
        subprocess.run(["kubectl", "apply", "-f", definitions], check=True, capture_output=True)
        self._create(NAMESPACES, None, {"metadata": {"name": self._namespace}})
        for index in range(STAND_IN_NODES):
            labels = {"elastune.dev/at-size": "true"}
            self._create(NODES, None, {"metadata": {"name": f"at-size-{index}", "labels": labels}})
        self.beat()

    def _create(self, kind: Collection, namespace: str | None, document: dict[str, Any]) -> None:
        try:
            self._api.create(kind, namespace, document)
        except ClusterRefused as error:
            if error.status != 409:
                raise

    def remove(self) -> None:
        self._stopped.set()
        self._api.delete(NAMESPACES, None, self._namespace)
        for index in range(STAND_IN_NODES):
            self._api.delete(NODES, None, f"at-size-{index}")
        for pod in self._pods():
            self._api.delete(PODS, self._namespace, pod["metadata"]["name"], grace_seconds=0)

    def beat(self) -> None:
        """Nodes that say nothing for long would be taken for lost."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        room = {"nvidia.com/gpu": str(TRIALS // STAND_IN_NODES), "cpu": "1000", "memory": "8Ti", "pods": "1000"}
        ready = {"type": "Ready", "status": "True", "reason": "StandIn", "lastHeartbeatTime": now}
        for index in range(STAND_IN_NODES):
            change = {"status": {"capacity": room, "allocatable": room, "conditions": [ready]}}
            self._api.patch(NODES, None, f"at-size-{index}", change, part="status")

    def _pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._api.list(PODS, self._namespace).get("items") or []
        return found

    def be_kubelets(self) -> None:
        while not self._stopped.wait(2.0):
            self.beat()
            for pod in self._pods():
                name = pod["metadata"]["name"]
                if pod["metadata"].get("deletionTimestamp"):
                    self._api.delete(PODS, self._namespace, name, grace_seconds=0)
                elif name not in self._running and pod["spec"].get("nodeName"):
                    self._api.patch(PODS, self._namespace, name, {"status": {"phase": "Running"}}, part="status")
                    self._running.add(name)

    async def be_replicas(self) -> None:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=self._url, timeout=60.0, limits=limits, trust_env=False) as client:
            begun: set[str] = set()
            tasks = []
            while not self._stopped.is_set():
                for name in self._running - begun:
                    begun.add(name)
                    tasks += [asyncio.ensure_future(do(client, name)) for do in (self._report, self._poll)]
                await asyncio.sleep(0.5)
            for task in tasks:
                task.cancel()

    async def _report(self, client: httpx2.AsyncClient, name: str) -> None:
        step = 0
        await asyncio.sleep(random.uniform(0.0, REPORT_SECONDS))
        while True:
            body = {"step": step, "value": 1.0 / (step + 1), "progress": float(step)}
            with contextlib.suppress(httpx2.TransportError):
                await client.post("/replica/report", json=body, headers=headers_of(self._tokens, name))
            step += 1
            await asyncio.sleep(REPORT_SECONDS)

    async def _poll(self, client: httpx2.AsyncClient, name: str) -> None:
        while True:
            try:
                await client.get(
                    "/replica/watch", params={"after": 0, "wait": 15.0}, headers=headers_of(self._tokens, name)
                )
            except httpx2.TransportError:
                await asyncio.sleep(1.0)


def writes(api: KubernetesApi) -> float:
    """Requests so far that changed trials, studies or pods, by the API server's own count."""
    text = api.raw("GET", "/metrics", query={}, timeout=(3.0, 30.0)).read().decode()
    counted = re.findall(r"^apiserver_request_total\{(.*?)\} ([0-9.e+]+)$", text, re.MULTILINE)
    return sum(
        float(value)
        for labels, value in counted
        if 'verb="PATCH"' in labels and ('resource="trials"' in labels or 'resource="studies"' in labels)
    )


def measure() -> list[Measurement]:
    """ELASTUNE_TRIALS and ELASTUNE_SECONDS change how many trials there are, and how long they are watched."""
    if "KUBECONFIG" not in os.environ:
        print("KUBECONFIG is not set: nothing was run")
        return []
    api, token = KubernetesApi.connect(), secrets.token_hex(24)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # One that is being deleted takes nothing new.
    namespace = f"elastune-at-size-{secrets.token_hex(3)}"
    stand_ins = StandIns(api, namespace, f"http://127.0.0.1:{port}", Tokens(token))
    stand_ins.make()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as state:
        module = [sys.executable, "-m", "benchmarks.cluster_at_size"]
        with open(Path(state) / "log", "w") as log:
            operator = subprocess.Popen([*module, "operate", namespace, str(port), token, state], stderr=log)
            others = subprocess.Popen([*module, "stand-in", namespace, str(port), token], stderr=log)
        client = SchedulerClient(f"http://127.0.0.1:{port}", token)
        try:
            return _measured(api, client, Tokens(token), psutil.Process(operator.pid))
        finally:
            for child in (operator, others):
                child.terminate()
                child.wait(30.0)
            stand_ins.remove()


def _measured(
    api: KubernetesApi, client: SchedulerClient, tokens: Tokens, operator: psutil.Process
) -> list[Measurement]:
    _until_it_answers(client)
    began = time.monotonic()
    for number in range(STUDIES):
        study = {"title": f"study {number}", "direction": "minimize", "owner": "nobody"}
        client.request("PUT", f"/studies/study-{number}", study)
    for number in range(TRIALS):
        # Nobody drives them: they go on when the studies' owner is gone.
        spec = TrialSpec(study=f"study-{number % STUDIES}", number=number, entrypoint="m:f", driven=False)
        client.request("POST", "/trials", spec.to_json())
    submitted = time.monotonic() - began
    while True:
        trials = client.request("GET", "/trials")
        states = [trial["state"] for trial in trials]
        if states.count("running") == TRIALS:
            break
        assert time.monotonic() - began < 900.0, {state: states.count(state) for state in set(states)}
        time.sleep(2.0)
    started = time.monotonic() - began
    print(f"  {TRIALS} trials submitted in {submitted:.0f} s, running after {started:.0f} s", flush=True)
    time.sleep(20.0)
    shown = client.request("GET", f"/trials/{trials[0]['trial_id']}")
    headers = headers_of(tokens, shown["replicas"][0]["replica_id"])
    ticks: list[float] = []
    answers: list[float] = []
    before, used, now = writes(api), operator.cpu_times(), time.monotonic()
    with httpx2.Client(base_url=client.url, timeout=60.0, trust_env=False) as replica:
        while time.monotonic() - now < SECONDS:
            ticks.append(_tick_seconds(client))
            for _ in range(10):
                body = {"step": 1_000_000 + len(answers), "value": 0.5, "progress": 1.0}
                asked = time.perf_counter()
                replica.post("/replica/report", json=body, headers=headers).raise_for_status()
                answers.append(time.perf_counter() - asked)
                time.sleep(0.1)
        passed, after = time.monotonic() - now, operator.cpu_times()
        written = (writes(api) - before) / passed
        decisions = [_seconds_to_decision(client, replica, tokens, each["trial_id"]) for each in trials[1:6]]
    cores = (after.user + after.system - used.user - used.system) / passed
    answers.sort()
    details = {
        "submit_seconds": submitted,
        "running_after_seconds": started,
        "cores": cores,
        "megabytes": operator.memory_info().rss / 1e6,
        "load": os.getloadavg()[0],
        "median_answer_ms": 1e3 * statistics.median(answers),
    }
    print(f"  {json.dumps(details)}", flush=True)
    what = f"{TRIALS} running trials on a real API server, a report of each every {REPORT_SECONDS:.0f} s"
    rows = (
        ("writes of trials and studies", written, MOST_WRITES, "a second"),
        ("from a report to a decision that knows it", statistics.median(decisions), DECISION_SECONDS, "s"),
        ("a look", statistics.median(ticks), TICK_SECONDS, "s"),
        ("answer to a report, 99th percentile", 1e3 * answers[int(0.99 * len(answers))], ANSWER_MS, "ms"),
    )
    return [
        Measurement(
            what=f"{what}: {name}",
            ours=ours,
            peer=most,
            unit=unit,
            peer_name="the most it may take",
            target=1.0,
            details=details,
        )
        for name, ours, most, unit in rows
    ]


def _seconds_to_decision(client: SchedulerClient, replica: httpx2.Client, tokens: Tokens, trial_id: str) -> float:
    """Return the seconds from a report that makes a trial the best of its study to a decision that has weighed it."""

    def weighed() -> Any:
        return client.request("GET", f"/trials/{trial_id}/why")["grant"]["numbers"].get("promise")

    (own,) = client.request("GET", f"/trials/{trial_id}")["replicas"]
    before, began = weighed(), time.monotonic()
    body = {"step": 2_000_000, "value": -1e9, "progress": 1.0}
    replica.post("/replica/report", json=body, headers=headers_of(tokens, own["replica_id"])).raise_for_status()
    while weighed() == before:
        assert time.monotonic() - began < 60.0, "no decision has known of a report"
        time.sleep(0.1)
    return time.monotonic() - began


def _until_it_answers(client: SchedulerClient) -> None:
    deadline = time.monotonic() + 120.0
    while True:
        try:
            client.check()
            return
        except Exception:
            assert time.monotonic() < deadline, "the scheduler does not lead"
            time.sleep(0.5)


def _tick_seconds(client: SchedulerClient) -> float:
    text = httpx2.get(f"{client.url}/metrics", headers={"Authorization": f"Bearer {client.token}"}, timeout=30.0).text
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith("elastune_tick_seconds ")))


if __name__ == "__main__":
    if sys.argv[1] == "operate":
        operate(sys.argv[2], sys.argv[5], int(sys.argv[3]), sys.argv[4])
    else:
        stand_in(sys.argv[2], int(sys.argv[3]), sys.argv[4])
