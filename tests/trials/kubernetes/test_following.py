"""What people do to resources with kubectl, and what the store makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.fake_cluster import FakeClusterApi
from tests.support.kubernetes_store import opened, spec
from trials.errors import ClusterRefused, InvalidTrialSpec, UnknownTrial
from trials.kubernetes.client.api import STUDIES, TRIALS
from trials.kubernetes.names import FINALIZER
from trials.kubernetes.resources import following
from trials.record import Study
from trials.states import TrialState
from trials.terms import StudyTerms


def applied(api: FakeClusterApi, name: str, namespace: str = "home", **fields: Any) -> dict[str, Any]:
    """A trial that somebody wrote by hand."""
    document = {"metadata": {"name": name}, "spec": {"command": ["python", "x.py"], **fields}}
    return api.create(TRIALS, namespace, document)


def test_a_trial_applied_by_hand_is_taken_over_once(api: FakeClusterApi) -> None:
    with opened(api) as store:
        document = applied(api, "mnist", study="digits", maxReplicas=3)
        assert store.following.take_trial(document)
        assert not store.following.take_trial(api.get(TRIALS, "home", "mnist"))
        record = store.trial("mnist")
        assert (record.spec.study, record.spec.number, record.submitted_at) == ("digits", 0, 100.0)
        assert api.get(TRIALS, "home", "mnist")["metadata"]["finalizers"] == [FINALIZER]
        store.following.take_trial(applied(api, "next", study="digits"))
        assert store.trial("next").spec.number == 1


def test_trials_of_another_namespace_are_called_by_it(api: FakeClusterApi) -> None:
    with opened(api) as store:
        store.following.take_trial(applied(api, "mnist", "team"))
        assert store.owner_of("team.mnist").namespace == "team"
        api.create(STUDIES, "team", {"metadata": {"name": "theirs"}, "spec": {"image": "i:1"}})
        store.following.take_study(api.get(STUDIES, "team", "theirs"))
        record = store.submit(spec(study="team.theirs"), 1.0)
        owner = store.owner_of(record.trial_id)
        assert (record.trial_id, owner.namespace, owner.image) == ("team.theirs-0", "team", "i:1")
        kept = api.get(TRIALS, "team", "theirs-0")
        assert kept["metadata"]["ownerReferences"][0]["kind"] == "Study"
        assert kept["spec"]["study"] == "theirs"
    with opened(api) as successor:
        assert successor.trial(record.trial_id).spec.study == "team.theirs"


def test_a_study_of_one_namespace_is_none_of_anothers(api: FakeClusterApi) -> None:
    """Whoever may write studies in a namespace would else choose the images and secrets of others' pods."""
    template = {"spec": {"initContainers": [{"name": "evil", "image": "evil:1"}]}}
    with opened(api) as store:
        api.create(STUDIES, "team", {"metadata": {"name": "s"}, "spec": {"template": template, "image": "evil:1"}})
        # A name that looks like one in the other namespace, and one of the other namespace that looks like ours.
        api.create(STUDIES, "home", {"metadata": {"name": "lookalike"}, "spec": {"name": "team.t", "image": "evil:1"}})
        api.create(STUDIES, "team", {"metadata": {"name": "titled"}, "spec": {"title": "s", "image": "evil:1"}})
        for namespace, name in (("team", "s"), ("home", "lookalike"), ("team", "titled")):
            store.following.take_study(api.get(STUDIES, namespace, name))
        ours = store.submit(spec(study="s"), 1.0)
        theirs = store.submit(spec(study="team.t"), 1.0)
        store.following.take_trial(applied(api, "mine", study="s"))
        for trial_id in (ours.trial_id, theirs.trial_id, "mine"):
            owner = store.owner_of(trial_id)
            assert (owner.templates, owner.image) == ((), "")
        assert "team.t" in api.get(STUDIES, "home", "lookalike")["status"]["message"]
        assert store.trial("mine").spec.number == 1
        assert not store.following.take_trial(applied(api, "sneaks", study="team.s"))
        assert (
            "begins with the prefix of studies of namespace" in api.get(TRIALS, "home", "sneaks")["status"]["message"]
        )


def test_a_sweep_follows_the_study_that_was_there_beforehand_under_its_name(api: FakeClusterApi) -> None:
    template = {"spec": {"nodeSelector": {"pool": "gpu"}}}
    with opened(api) as store:
        beforehand = {"template": template, "image": "i:1", "queueName": "q", "quota": 3}
        api.create(STUDIES, "team", {"metadata": {"name": "resnet"}, "spec": beforehand})
        store.following.take_study(api.get(STUDIES, "team", "resnet"))
        terms = StudyTerms(yields_to=("team.other", "near"))
        store.put_study(Study(name="team.resnet-b0c9", title="team.resnet", terms=terms))
        made = api.get(STUDIES, "team", "resnet-b0c9")
        assert (made["spec"]["name"], made["spec"]["title"]) == ("resnet-b0c9", "resnet")
        record = store.submit(spec(study="team.resnet-b0c9"), 1.0)
        owner = store.owner_of(record.trial_id)
        assert (owner.namespace, owner.image, owner.queue, owner.templates) == ("team", "i:1", "q", (template,))
        # What is changed there holds for the pods to come.
        api.patch(STUDIES, "team", "resnet", {"spec": {"image": "i:2"}})
        store.following.take_study(api.get(STUDIES, "team", "resnet"))
        assert store.owner_of(record.trial_id).image == "i:2"
        told = store.studies()
        with pytest.raises(InvalidTrialSpec, match=r"'team\.resnet' begins with the prefix of studies of namespace"):
            store.put_study(Study(name="x", title="team.resnet"))
    with opened(api) as successor:
        assert sorted(successor.studies(), key=lambda each: each.name) == sorted(told, key=lambda each: each.name)


def test_one_that_makes_no_sense_says_so_in_its_status(api: FakeClusterApi) -> None:
    with opened(api) as store:
        assert not store.following.take_trial(applied(api, "bad", minReplicas=3, maxReplicas=1))
        status = api.get(TRIALS, "home", "bad")["status"]
        assert (status["phase"], status["reason"]) == ("Failed", "invalid")
        assert "max_replicas" in status["message"]
        calls = len(api.calls)
        assert not store.following.take_trial(api.get(TRIALS, "home", "bad"))
        assert [call for call in api.calls[calls:] if call[0] == "patch"] == []


def test_kubectl_scale_changes_the_bounds_and_nothing_else(api: FakeClusterApi) -> None:
    with opened(api) as store:
        store.following.take_trial(applied(api, "mnist", maxReplicas=1))
        changed = api.patch(TRIALS, "home", "mnist", {"spec": {"maxReplicas": 4, "study": "other"}})
        assert store.following.take_trial(changed)
        assert (store.trial("mnist").spec.max_replicas, store.trial("mnist").spec.study) == (4, "mnist")


def test_scaling_below_the_minimum_lowers_both_and_survives_a_change_of_leader(api: FakeClusterApi) -> None:
    with opened(api) as store:
        store.following.take_trial(applied(api, "mnist", minReplicas=2, maxReplicas=4))
        assert store.following.take_trial(api.patch(TRIALS, "home", "mnist", {"spec": {"maxReplicas": 1}}))
        assert (store.trial("mnist").spec.min_replicas, store.trial("mnist").spec.max_replicas) == (1, 1)
    with opened(api) as store:
        assert (store.trial("mnist").spec.min_replicas, store.trial("mnist").spec.max_replicas) == (1, 1)


def test_old_news_of_a_trial_that_was_made_anew_is_left_alone(api: FakeClusterApi) -> None:
    with opened(api) as store:
        first = applied(api, "mnist")
        first["metadata"]["creationTimestamp"] = "2025-12-31T00:00:00Z"
        del api.objects["trials", "home", "mnist"]
        second = applied(api, "mnist", maxReplicas=3)
        assert store.following.take_trial(second)
        assert not store.following.take_trial(first)
        assert store.trial("mnist").spec.max_replicas == 3


def test_one_resource_that_cannot_be_taken_over_keeps_nobody_from_working(
    api: FakeClusterApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied(api, "refused")
    applied(api, "fine")
    applied(api, "x" * 60)
    patch = api.patch

    def refuse(kind: Any, namespace: Any, name: str, *rest: Any) -> Any:
        if name == "refused":
            raise ClusterRefused("a webhook says no", status=403)
        return patch(kind, namespace, name, *rest)

    monkeypatch.setattr(api, "patch", refuse)
    with opened(api) as store:
        assert [record.trial_id for record in store.trials()] == ["fine"]
    assert "at most 50 lower-case letters" in api.get(TRIALS, "home", "x" * 60)["status"]["message"]


def test_a_deleted_trial_is_cancelled_first_and_goes_when_it_is_let_go(api: FakeClusterApi) -> None:
    with opened(api) as store:
        store.following.take_trial(applied(api, "mnist"))
        api.delete(TRIALS, "home", "mnist")
        assert store.following.take_trial(api.get(TRIALS, "home", "mnist"))
        record = store.trial("mnist")
        assert record.cancel_requested == "its resource was deleted"
        assert store.following.bound() == []
        store.save_trial(replace(record, state=TrialState.CANCELLED))
        assert [each.trial_id for each in store.following.bound()] == ["mnist"]
        document = api.get(TRIALS, "home", "mnist")
        store.following.let_go("mnist")
        assert ("trials", "home", "mnist") not in api.objects
        store.following.forget_trial(document)
        # Its driver still hears how it ended, for a while.
        assert store.trial("mnist").state is TrialState.CANCELLED


def test_what_is_gone_is_forgotten_in_the_end(api: FakeClusterApi) -> None:
    now = [100.0]
    with opened(api, lambda: now[0]) as store:
        document = applied(api, "mnist")
        store.following.take_trial(document)
        store.save_trial(replace(store.trial("mnist"), state=TrialState.CANCELLED))
        store.following.forget_trial(document)
        store.following.forget_gone()
        assert store.trial("mnist")
        now[0] += following.GONE_SECONDS + 1
        store.following.forget_gone()
        with pytest.raises(UnknownTrial):
            store.trial("mnist")


def test_one_whose_resource_vanished_is_cancelled(api: FakeClusterApi) -> None:
    with opened(api) as store:
        record = store.submit(spec(), 1.0)
        del api.objects["trials", "home", record.trial_id]
        store.save_trial(replace(record, state=TrialState.RUNNING))
        assert store.trial(record.trial_id).cancel_requested == "its resource was deleted"


def test_of_two_studies_with_one_name_the_first_counts(api: FakeClusterApi) -> None:
    with opened(api) as store:
        for name, weight in (("first", 2), ("second", 3)):
            document = {"metadata": {"name": name}, "spec": {"name": "same", "weight": weight}}
            store.following.take_study(api.create(STUDIES, "home", document))
        assert [study.terms.weight for study in store.studies()] == [2]
        assert "home/first" in api.get(STUDIES, "home", "second")["status"]["message"]


def test_terms_changed_with_kubectl_are_followed_and_the_drivers_lease_kept(api: FakeClusterApi) -> None:
    with opened(api) as store:
        store.put_study(Study(name="s", owner="me", owner_seen_at=5.0))
        store.touch_study("s", "me", 9.0)
        changed = api.patch(STUDIES, "home", "s", {"spec": {"weight": 4}})
        assert store.following.take_study(changed)
        (study,) = store.studies()
        assert (study.terms.weight, study.owner, study.owner_seen_at) == (4, "me", 9.0)
        store.flush()
        assert api.get(STUDIES, "home", "s")["status"]["ownerSeenAt"] == 9.0
