"""One scheduler process of a cluster: stands for election, and leads or waits, until told to stop.

Whether it leads or not it answers the API server's admission questions and health probes, over TLS. Only the one that
leads has a store, a loop and the API; it marks its own pod as leader, which is what the API's service selects.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from scheduler.api.app import api_config
from scheduler.api.bodies import BodyLimit
from scheduler.api.service import assemble
from scheduler.api.tokens import Secrets, Tokens
from scheduler.errors import SchedulerError
from scheduler.kubernetes.admission import Certificate, review, shared_certificate, shared_secret, trust
from scheduler.kubernetes.housekeeping import Housekeeping
from scheduler.kubernetes.leadership import Lease, lead_when_elected, resign
from scheduler.kubernetes.placeholders import Placeholders
from scheduler.kubernetes.site import ClusterSite
from scheduler.log_lines import log_to_stderr
from scheduler.loop.control_loop import ControlLoop
from scheduler.loop.loop_thread import STUCK_SECONDS
from scheduler.policy import policy_by_name
from trials.errors import ClusterRefused, ClusterUnreachable
from trials.kubernetes.client.api import PODS, SECRETS, SERVICES, ClusterApi, KubernetesApi
from trials.kubernetes.names import LEADER_LABEL
from trials.kubernetes.resources.store import KubernetesTrialStore
from trials.kubernetes.settings import ClusterSettings, read_settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAVING_SECONDS = 8.0
"""Seconds for replicas of a finished trial: an orderly end, the kubelet's report of it, and what they printed."""
DECIDE_SECONDS = 5.0
"""Between two decisions about sizes: a pod takes about as long to come up. Who comes or goes is decided on at once."""
REVIEW_BYTES = 8 * 1024**2
"""An object before and after its change, each of at most what the API server takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    cluster: ClusterSettings
    tokens: Callable[[], Tokens]
    """Asked when this process comes to lead: the one that led before may have replaced some."""
    host: str = "0.0.0.0"  # noqa: S104  # a pod's own address; its NetworkPolicy says who may call
    port: int = 7300
    webhook_port: int = 7443
    service: str | None = None
    """Name of the service that leads to the scheduler that leads."""
    url: str | None = None
    """Address by which replicas reach the scheduler; None: its service's."""
    webhook: str | None = None
    """Name of the ValidatingWebhookConfiguration that asks this scheduler; None: nobody asks."""
    webhook_secret: str | None = None
    webhook_names: tuple[str, ...] = ()
    policy: str = "goodput"
    identity: str = ""
    """Name of this process in the leader election: its pod's name."""
    lease: str = "elastune"


class Operator:
    def __init__(self, api: KubernetesApi, settings: OperatorSettings) -> None:
        self._api = api
        self._settings = settings
        self._namespace = settings.cluster.namespace
        self._identity = settings.identity or f"{socket.gethostname()}-{os.getpid()}"
        self._stop = threading.Event()
        self._server: uvicorn.Server | None = None
        self._loop: ControlLoop | None = None
        self._store: KubernetesTrialStore | None = None
        self._is_leader = threading.Event()
        self._begun = False
        self._lease = Lease(
            api, settings.cluster.namespace, settings.lease, self._identity, led_by_other=self._end_for_other
        )
        self._certificates = tempfile.TemporaryDirectory(prefix="elastune-webhook-")
        self._state = Path(settings.cluster.state_dir)
        # What cannot work is said before anybody waits for a leader.
        policy_by_name(settings.policy)
        self._state.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Run until SIGTERM or SIGINT, or until another scheduler leads instead of this one."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        patiently(lambda: self._mark_leader(self._identity, leads=False))
        threading.Thread(target=self._answer_reviews, name="webhook", daemon=True).start()
        threading.Thread(target=self._stand, name="election", daemon=True).start()
        self._stop.wait()
        self._finish()

    def _stand(self) -> None:
        """Lead, and stand again whenever the lease could not be renewed.

        Meanwhile the loop rests, and replicas are answered: an API server that is away for a while stops no trial.
        """
        while not self._stop.is_set():
            try:
                lead_when_elected(self._lease, self._resume if self._begun else self._begin)
            except Exception:
                logger.exception("the election failed")
            if not self._stop.is_set():
                logger.warning("the lease was not renewed: no decisions until it is")
                time.sleep(1.0)

    def _begin(self) -> None:
        self._begun = True
        try:
            self._lead()
        except Exception:
            logger.exception("this process cannot lead: exiting, so that another one can")
        if not self._stop.is_set():
            os._exit(1)

    def _resume(self) -> None:
        logger.info("the lease is held again: decisions continue")

    def _end_for_other(self, holder: str) -> None:
        if not self._stop.is_set():
            logger.error("%s leads now: exiting, so that no two schedulers decide", holder)
            os._exit(1)

    def _finish(self) -> None:
        logger.info("stopping; trials keep training")
        if self._server is not None:
            self._server.should_exit = True
        if self._loop is not None:
            self._loop.stop()
        self._lease.give_up()
        if self._store is not None:
            with contextlib.suppress(ClusterRefused):
                self._store.close()
        resign(self._api, self._namespace, self._settings.lease, self._identity)
        self._certificates.cleanup()

    # ------------------------------------------------------------------ leading

    def _lead(self) -> None:
        """Take over what is there, and go on with it. What it raises ends the leadership."""
        began = time.monotonic()
        settings, cluster = self._settings, self._settings.cluster
        self._mark_others()
        store = self._store = KubernetesTrialStore(self._api, cluster)
        site = ClusterSite(self._api, cluster, store)
        tokens = settings.tokens()
        url = settings.url or self._service_url()
        service = assemble(
            store,
            site,
            tokens,
            policy=settings.policy,
            url=url,
            state_dir=self._state,
            decide_every_seconds=DECIDE_SECONDS,
            decide_on_loss_or_end=True,
            leaving_seconds=LEAVING_SECONDS,
            may_act=self._lease.is_fresh,
        )
        loop = self._loop = service.loop
        placeholders = Placeholders(self._api, cluster, site.view.pods, site.view.nodes)
        loop.after_look.append(Housekeeping(store, loop, cluster, placeholders, clock=service.clock).look)
        site.begin(store, loop, url, tokens.for_agents())
        self._server = uvicorn.Server(api_config(service, host=settings.host, port=settings.port))
        threading.Thread(target=self._announce, args=(url, began), daemon=True).start()
        self._server.run()
        if not self._stop.is_set():
            raise RuntimeError("the API's server has ended")

    def _announce(self, url: str, began: float) -> None:
        while self._server is not None and not self._server.started:
            time.sleep(0.01)
        self._mark_leader(self._identity, leads=True)
        self._is_leader.set()
        logger.info("leading identity=%s url=%s seconds=%.2f", self._identity, url, time.monotonic() - began)

    def _service_url(self) -> str:
        """Return the service's address, which works where a cluster has no name service, too."""
        if self._settings.service is None:
            return f"http://{self._settings.host}:{self._settings.port}"
        service = self._api.get(SERVICES, self._namespace, self._settings.service)
        ports = {port.get("name"): port["port"] for port in service["spec"]["ports"]}
        return f"http://{service['spec']['clusterIP']}:{ports.get('api', self._settings.port)}"

    def _mark_leader(self, pod: str, *, leads: bool) -> None:
        """Label the pod so that the API's service leads here, or does not; outside a cluster there is no such pod."""
        change = {"metadata": {"labels": {LEADER_LABEL: "true" if leads else None}}}
        try:
            self._api.patch(PODS, self._namespace, pod, change)
        except ClusterRefused as error:
            if error.status != 404:
                raise

    def _mark_others(self) -> None:
        """Mark former leaders: one that is still there, such as on a node that does not answer, must not be called."""
        marked = self._api.list(PODS, self._namespace, labels=f"{LEADER_LABEL}=true").get("items") or ()
        for pod in marked:
            if pod["metadata"]["name"] != self._identity:
                with contextlib.suppress(ClusterRefused):
                    self._mark_leader(pod["metadata"]["name"], leads=False)

    # ------------------------------------------------------------------ whether it leads or not

    def _answer_reviews(self) -> None:
        """Answer reviews over TLS for the API server; where nobody asks for them, health alone without."""
        settings = self._settings
        tls: dict[str, Any] = {}
        if settings.webhook_secret is not None:
            certificate, key = self._certificate().write(Path(self._certificates.name))
            tls = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
        uvicorn.Server(
            uvicorn.Config(
                review_app(
                    self._is_leader.is_set, settings.cluster, lambda: 0.0 if self._loop is None else self._loop.age
                ),
                host=settings.host,
                port=settings.webhook_port,
                log_config=None,
                access_log=False,
                **tls,
            )
        ).run()

    def _certificate(self) -> Certificate:
        settings = self._settings
        assert settings.webhook_secret is not None
        while True:
            try:
                names = settings.webhook_names or ("localhost",)
                certificate = shared_certificate(self._api, self._namespace, settings.webhook_secret, names)
                if settings.webhook is not None:
                    trust(self._api, settings.webhook, certificate)
                return certificate
            except (ClusterRefused, ClusterUnreachable) as error:
                logger.warning("the webhook cannot be served yet: %s", error)
                time.sleep(2.0)


def patiently(call: Callable[[], T]) -> T:
    """Until the API server answers."""
    while True:
        try:
            return call()
        except ClusterUnreachable as error:
            logger.warning("waiting for the API server: %s", error)
            time.sleep(2.0)


def review_app(leads: Callable[[], bool], settings: ClusterSettings, age: Callable[[], float] = lambda: 0.0) -> FastAPI:
    """Admission reviews and health, without a token: the API server and the kubelet have none."""
    app = FastAPI(title="Elastune admission", docs_url=None, openapi_url=None)
    app.add_middleware(BodyLimit, limit=REVIEW_BYTES)

    @app.post("/review")
    def answer(document: dict[str, Any]) -> JSONResponse:
        return JSONResponse(review(document, settings))

    @app.get("/healthz")
    def healthz(response: Response) -> dict[str, Any]:
        """Answer the kubelet, which starts a scheduler anew whose loop is stuck."""
        if age() > STUCK_SECONDS:
            response.status_code = 503
            return {"status": f"the control loop has not run for {age():.0f} s", "leads": leads()}
        return {"status": "ok", "leads": leads()}

    return app


def run_operator(settings: Path, *, token_secret: str | None = None, **options: Any) -> None:
    """Run until SIGTERM; raise InvalidClusterSettings, ClusterUnreachable or SchedulerError."""
    log_to_stderr()
    for noisy in ("httpx2", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # Its watches say themselves, in one line, what went wrong.
    logging.getLogger("kubernetes").setLevel(logging.CRITICAL)
    cluster = read_settings(settings)
    api = KubernetesApi.connect()
    tokens: Callable[[], Tokens]
    given = os.environ.get("ELASTUNE_TOKEN")
    if given:
        tokens = partial(Tokens, given, fixed=True)
    elif token_secret is not None:
        tokens = partial(patiently, partial(shared_tokens, api, cluster.namespace, token_secret))
    else:
        raise SchedulerError("there is no token for the API; set ELASTUNE_TOKEN, or name a secret with --token-secret")
    # What cannot be read is said before anybody waits for a leader.
    tokens()
    Operator(api, OperatorSettings(cluster=cluster, tokens=tokens, **options)).run()


def shared_tokens(api: ClusterApi, namespace: str, secret: str) -> Tokens:
    """Return the tokens that the secret's values make; the first scheduler that finds none makes them."""
    kept = {
        **shared_secret(api, namespace, secret, ("token",), lambda: {"token": secrets.token_hex(24).encode()}),
        **shared_secret(api, namespace, secret, ("key",), lambda: {"key": secrets.token_hex(32).encode()}),
        **shared_secret(api, namespace, secret, ("versions",), lambda: {"versions": b"{}"}),
    }

    def save(changed: Secrets) -> None:
        values = {"token": changed.owner, "versions": json.dumps(dict(changed.versions))}
        data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
        api.patch(SECRETS, namespace, secret, {"data": data})

    versions = json.loads(kept["versions"])
    return Tokens(Secrets(owner=kept["token"].decode(), key=kept["key"].decode(), versions=versions), save=save)
