"""The life of trials and studies as resources: applied, changed, scaled and deleted by users, let go when over.

Called with what the watches tell, in any order and more than once. A resource that makes no sense is told so in its
status; it keeps nobody from the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trials.errors import ClusterRefused, InvalidStudyTerms, InvalidTrialSpec
from trials.kubernetes.client.api import STUDIES, TRIALS, ClusterApi
from trials.kubernetes.names import FINALIZER, LONGEST_TRIAL_NAME, is_name
from trials.kubernetes.resources import documents
from trials.kubernetes.resources.backing import ClusterBacking, StudyResource, TrialResource
from trials.kubernetes.settings import ClusterSettings
from trials.record import TrialRecord
from trials.spec import TrialSpec
from trials.store.memory import TrialStore

GONE_SECONDS = 600.0

logger = logging.getLogger(__name__)


class Following:
    """Brings trials and studies in line with the custom resources that users change.

    ``take_all`` first; ``take_trial``, ``forget_trial`` and so on with everything that the watches tell.
    """

    def __init__(
        self,
        api: ClusterApi,
        settings: ClusterSettings,
        memory: TrialStore,
        resources: ClusterBacking,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._settings = settings
        self._memory = memory
        self._resources = resources
        self._clock = clock

    def take_all(self) -> None:
        """Take all resources over; raise StoreUnavailable when the API server does not answer."""
        for namespace in self._settings.all_namespaces:
            for document in self._api.list(STUDIES, namespace).get("items") or ():
                self._take_contained(self.take_study, document)
            for document in sorted(self._api.list(TRIALS, namespace).get("items") or (), key=_submitted_at):
                self._take_contained(self.take_trial, document)

    @staticmethod
    def _take_contained(take: Callable[[Mapping[str, Any]], bool], document: Mapping[str, Any]) -> None:
        """Take one resource over; one that cannot be must not keep the scheduler from looking after the others."""
        try:
            take(document)
        except ClusterRefused as error:
            metadata = document["metadata"]
            logger.error(
                "could not take over a resource namespace=%s name=%s: %s",
                metadata["namespace"],
                metadata["name"],
                error,
            )

    def take_trial(self, document: Mapping[str, Any]) -> bool:
        """Learn of a trial from the watch: one that somebody applied, changed or deleted. Whether that was news."""
        metadata = document["metadata"]
        trial_id = self._settings.name_of(metadata["namespace"], metadata["name"])
        with self._resources.births:
            kept = self._resources.trials.get(trial_id)
            created = metadata.get("creationTimestamp") or ""
            if kept is not None and kept.uid != metadata.get("uid") and created < kept.created:
                # News from before that trial was deleted, and another one of its name made.
                return False
            if kept is None or kept.uid != metadata.get("uid"):
                return self._adopt(document, trial_id)
        return self._follow(document, trial_id, kept)

    def _adopt(self, document: Mapping[str, Any], trial_id: str) -> bool:
        namespace = document["metadata"]["namespace"]
        study = self._settings.name_of(
            namespace, (document.get("spec") or {}).get("study") or document["metadata"]["name"]
        )
        new = ((document.get("status") or {}).get("record")) is None
        if new and (document.get("status") or {}).get("phase") == "Failed":
            # Refused before.
            return False
        name = document["metadata"]["name"]
        if new and not is_name(name):
            rule = f"at most {LONGEST_TRIAL_NAME} lower-case letters, digits and dashes"
            self._refuse(document, f"metadata.name is {name!r}; it must be {rule}")
            return False
        try:
            objection = self._settings.objection_to(study, namespace)
            if objection is not None:
                raise InvalidTrialSpec(f"spec.study: {objection}")
            number = self._free_number(study) if new else None
            parsed = documents.trial_object(document, trial_id, number, home=self._settings.namespace)
            if new and self._has_number(parsed.record.spec, trial_id):
                raise InvalidTrialSpec(
                    f"spec.number is {parsed.record.spec.number}, which study {study!r} already has; leave it out"
                )
        except (InvalidTrialSpec, ValueError, KeyError, TypeError) as error:
            self._refuse(document, str(error))
            return False
        if new:
            parsed = replace(parsed, record=replace(parsed.record, submitted_at=self._clock()))
            if FINALIZER not in parsed.finalizers and not parsed.deleted:
                self._api.patch(
                    TRIALS,
                    parsed.namespace,
                    parsed.name,
                    {"metadata": {"finalizers": [*parsed.finalizers, FINALIZER]}},
                )
                parsed = replace(parsed, finalizers=(*parsed.finalizers, FINALIZER))
            self._api.patch(
                TRIALS, parsed.namespace, parsed.name, {"status": documents.record_status(parsed.record)}, "status"
            )
        self._resources.remember(parsed)
        if parsed.deleted and not parsed.record.state.is_final and parsed.record.cancel_requested is None:
            self._memory.request_cancel(trial_id, "its resource was deleted")
        return True

    def _follow(self, document: Mapping[str, Any], trial_id: str, kept: TrialResource) -> bool:
        """Follow what a user may change in a trial that is there."""
        news = False
        with kept.writing:
            record = self._memory.trial(trial_id)
            kept.finalizers = tuple(document["metadata"].get("finalizers") or ())
            if document["metadata"].get("deletionTimestamp") and record.cancel_requested is None:
                if not record.state.is_final:
                    self._memory.request_cancel(trial_id, "its resource was deleted")
                news = True
            try:
                wanted = documents.spec_from(document, record.spec.number, scaled=True)
            except InvalidTrialSpec as error:
                logger.warning("ignored a change of a trial trial=%s error=%s", trial_id, error)
                return news
            # For the pods to come; what a trial runs stays what it was.
            kept.template = (document.get("spec") or {}).get("template") or {}
            kept.queue = (document.get("spec") or {}).get("queueName") or ""
            changes = {name: getattr(wanted, name) for name in documents.CHANGEABLE}
            spec = replace(record.spec, **changes)
            if spec != record.spec:
                self._memory.adopt(replace(record, spec=spec))
                news = True
        return news

    def _refuse(self, document: Mapping[str, Any], why: str) -> None:
        metadata = document["metadata"]
        logger.warning("trial refused namespace=%s name=%s why=%s", metadata["namespace"], metadata["name"], why)
        status = {"phase": "Failed", "reason": "invalid", "message": why}
        self._api.patch(TRIALS, metadata["namespace"], metadata["name"], {"status": status}, "status")

    def _free_number(self, study: str) -> int:
        taken = {trial.spec.number for trial in self._memory.trials() if trial.spec.study == study}
        return max(taken, default=-1) + 1

    def _has_number(self, spec: TrialSpec, trial_id: str) -> bool:
        return any(
            (trial.spec.study, trial.spec.number) == (spec.study, spec.number) and trial.trial_id != trial_id
            for trial in self._memory.trials()
        )

    def forget_trial(self, document: Mapping[str, Any]) -> None:
        metadata = document["metadata"]
        trial_id = self._settings.name_of(metadata["namespace"], metadata["name"])
        with self._resources.births:
            kept = self._resources.trials.get(trial_id)
            if kept is not None and kept.uid == metadata.get("uid"):
                self._resources.lost(trial_id, kept)

    def forget_gone(self) -> None:
        """Let go of trials whose resources went a while ago."""
        with self._resources.births:
            for trial_id, kept in list(self._resources.trials.items()):
                over = self._memory.trial(trial_id).state.is_final
                if over and kept.gone_at is not None and self._clock() - kept.gone_at > GONE_SECONDS:
                    del self._resources.trials[trial_id]
                    self._memory.forget_trial(trial_id)

    def take_study(self, document: Mapping[str, Any]) -> bool:
        """Learn of a study from the watch; whether that was news. One of two with the same name is left out."""
        metadata = document["metadata"]
        try:
            study = documents.study_from(document, home=self._settings.namespace)
        except (InvalidStudyTerms, TypeError) as error:
            self._tell_study(metadata, f"not followed: {error}")
            return False
        for name in filter(None, (study.name, study.title)):
            objection = self._settings.objection_to(name, metadata["namespace"])
            if objection is not None:
                self._tell_study(metadata, f"not followed: {objection}")
                return False
        with self._resources.births:
            kept = self._resources.studies.get(study.name)
            here = (metadata["namespace"], metadata["name"])
            if kept is not None and (kept.namespace, kept.name) != here:
                self._tell_study(metadata, f"not followed: {kept.namespace}/{kept.name} already has this spec.name")
                return False
            spec = document.get("spec") or {}
            if kept is not None and kept.spec == spec and kept.uid == metadata.get("uid"):
                return False
            touched = kept is not None and kept.touched
            self._resources.studies[study.name] = StudyResource(*here, metadata.get("uid", ""), spec, touched)
            present = next((each for each in self._memory.studies() if each.name == study.name), None)
            if present is not None:
                # The driver's lease is newer here.
                study = replace(
                    study, owner=present.owner, owner_seen_at=present.owner_seen_at, user=study.user or present.user
                )
            self._memory.adopt_study(study)
        return True

    def _tell_study(self, metadata: Mapping[str, Any], message: str) -> None:
        self._api.patch(STUDIES, metadata["namespace"], metadata["name"], {"status": {"message": message}}, "status")

    def forget_study(self, document: Mapping[str, Any]) -> None:
        name = documents.study_key(document, self._settings.namespace)
        with self._resources.births:
            kept = self._resources.studies.get(name)
            if kept is not None and kept.uid == document["metadata"].get("uid"):
                del self._resources.studies[name]
                self._memory.forget_study(name)

    # ------------------------------------------------------------------ when a trial is over

    def bound(self) -> list[TrialRecord]:
        """Trials that are over and whose resources still wait for `let_go`."""
        waiting = [trial_id for trial_id, kept in list(self._resources.trials.items()) if FINALIZER in kept.finalizers]
        return [record for record in map(self._memory.trial, waiting) if record.state.is_final]

    def let_go(self, trial_id: str) -> None:
        """Let a trial's resource go when somebody deletes it: nothing of the trial is left on the cluster."""
        kept = self._resources.of(trial_id)
        left = [name for name in kept.finalizers if name != FINALIZER]
        with self._resources.sending(trial_id, kept):
            self._api.patch(TRIALS, kept.namespace, kept.name, {"metadata": {"finalizers": left}})
        kept.finalizers = tuple(left)


def _submitted_at(document: Mapping[str, Any]) -> float:
    """Return the submission time of a trial; infinity if it has no record, so that it sorts last."""
    record = (document.get("status") or {}).get("record") or {}
    return float(record.get("submittedAt", float("inf")))
