"""Trials and studies survive the way into custom resources and back."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_cluster import merge_patch
from trials.errors import InvalidStudyTerms, InvalidTrialSpec
from trials.kubernetes.names import is_name, object_name, trial_object_name
from trials.kubernetes.resources import documents
from trials.record import Outcome, Reason, ReplicaRecord, ReplicaState, Report, Study, TrialRecord
from trials.spec import TrialSpec
from trials.states import TrialState

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
names = st.text(string.ascii_letters, min_size=1, max_size=10)
times = st.floats(0, 1e10)

specs = st.builds(
    TrialSpec,
    study=st.text(min_size=1, max_size=40),
    number=st.integers(0, 10**6),
    entrypoint=st.just("module:function"),
    payload=st.dictionaries(st.text(max_size=5), json_values, max_size=4),
    min_replicas=st.integers(1, 3),
    max_replicas=st.integers(3, 9),
    preemptible=st.booleans(),
    only_on=st.lists(names, max_size=2).map(tuple),
    working_dir=st.sampled_from([".", "/w"]),
    environ=st.dictionaries(names, st.text(max_size=5), max_size=2),
    image=st.sampled_from(["", "image:1"]),
    package=st.sampled_from(["", "a" * 64]),
)
records = st.builds(
    TrialRecord,
    trial_id=st.just("t"),
    spec=specs,
    state=st.sampled_from(TrialState),
    reason=st.builds(Reason, code=names, sentence=names),
    submitted_at=times,
    finished_at=st.none() | times,
    generation=st.integers(0, 9),
    members=st.lists(names, max_size=3).map(tuple),
    published=st.integers(0, 9),
    published_members=st.lists(names, max_size=3).map(tuple),
    published_at=times,
    join_epoch=st.none() | st.integers(0, 9),
    entered=st.integers(0, 9),
    losses=st.integers(0, 3),
    outcome=st.none() | st.builds(Outcome, kind=st.just("value"), value=json_values),
    cancel_requested=st.none() | names,
    hold=st.none() | names,
)

replicas = st.builds(
    ReplicaRecord,
    replica_id=st.just("r"),
    trial_id=st.just("t"),
    node=names,
    slot=st.integers(0, 9),
    launch_index=st.integers(0, 9),
    state=st.sampled_from(ReplicaState),
    join_epoch=st.none() | st.integers(0, 9),
    launched_at=times,
    contact_at=st.none() | times,
)


def through_the_server(document: Any) -> Any:
    """JSON, where the API server writes whole numbers without a point."""
    if isinstance(document, float) and document.is_integer() and abs(document) < 2**53:
        return int(document)
    if isinstance(document, dict):
        return {key: through_the_server(value) for key, value in document.items()}
    if isinstance(document, list):
        return [through_the_server(value) for value in document]
    return json.loads(json.dumps(document))


@given(records)
def test_a_record_comes_back_as_it_was(record: TrialRecord) -> None:
    document = documents.trial_document(record.spec, "t", "team", study=record.spec.study, owner=None, labels={})
    stored = merge_patch(document, {"status": documents.record_status(record)})
    found = documents.record_from(through_the_server(stored), "t", home="team")
    assert found == record
    away = documents.record_from(through_the_server(stored), "t", home="home")
    assert away.spec.study == f"team.{record.spec.study}"
    assert json.dumps(found.spec.payload) == json.dumps(record.spec.payload)


@given(replicas)
def test_a_replica_comes_back_as_it_was(replica: ReplicaRecord) -> None:
    kept = merge_patch({}, through_the_server(documents.replica_status(replica)))
    assert documents.replica_from("r", "t", kept) == replica


@given(st.none() | st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e12))
def test_a_report_comes_back_bit_for_bit(value: float | None, progress: float) -> None:
    report = Report("t", 3, value, progress)
    document = {
        "metadata": {"name": "t", "namespace": "n"},
        "spec": {"entrypoint": "m:f"},
        "status": {"reports": {"3": documents.report_status(report)}},
    }
    assert documents.trial_object(through_the_server(document), "t", home="n").reports == (report,)


@given(json_values, json_values)
def test_two_changes_merged_do_what_they_do_one_after_the_other(first: Any, second: Any) -> None:
    before = {"a": 1, "b": {"c": 2}}
    changes: list[dict[str, Any]] = [{"b": {"x": first}, "n": None}, {"b": {"x": second, "c": None}}]
    one_by_one = merge_patch(merge_patch(before, changes[0]), changes[1])
    assert merge_patch(before, documents.merged(changes[0], changes[1])) == one_by_one


def test_a_trial_written_by_hand_needs_a_command_only() -> None:
    spec = documents.spec_from({"metadata": {"name": "mnist"}, "spec": {"command": ["python", "train.py"]}})
    assert (spec.study, spec.number, spec.min_replicas, spec.max_replicas) == ("mnist", 0, 1, 1)
    assert spec.entrypoint == documents.COMMAND_ENTRYPOINT
    assert spec.payload == {"command": ["python", "train.py"]}
    # Nobody waits for it, so nobody's leaving pauses it.
    assert not spec.driven


@pytest.mark.parametrize("driven", [True, False])
def test_a_trial_of_a_front_end_comes_back_as_it_was(driven: bool) -> None:
    spec = TrialSpec(study="s", number=3, entrypoint="m:f", payload={"x": 1.0, "none": None}, driven=driven)
    document = json.loads(json.dumps(documents.trial_document(spec, "s-3", "home", study="s", owner=None, labels={})))
    assert documents.spec_from(document) == spec


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "neither a command nor an entrypoint"),
        ({"command": ["a"], "entrypoint": "m:f"}, "a command and an entrypoint"),
        ({"command": "python train.py"}, "must be a non-empty list of strings"),
        ({"command": ["a"], "replicas": 2}, "spec.replicas is not known"),
        ({"command": ["a"], "minReplicas": 3, "maxReplicas": 2}, "must not exceed max_replicas"),
        ({"entrypoint": "m:f", "encodedPayload": "{"}, "encodedPayload is not valid JSON"),
        ({"entrypoint": "nonsense"}, "must have the form 'package.module:function'"),
    ],
)
def test_a_trial_that_makes_no_sense_is_refused_by_field(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidTrialSpec, match=words):
        documents.spec_from({"metadata": {"name": "x"}, "spec": spec})


def test_a_study_is_called_by_its_name_or_by_its_resources() -> None:
    def study(spec: dict[str, Any], namespace: str = "home") -> Study:
        return documents.study_from({"metadata": {"name": "x", "namespace": namespace}, "spec": spec}, home="home")

    assert study({"weight": 2}).name == "x"
    found = study({"name": "my study", "quota": 4})
    assert (found.name, found.terms.quota) == ("my study", 4)
    theirs = study({"name": "my study", "title": "ours", "yieldsTo": ["x"]}, "team")
    assert (theirs.name, theirs.title, theirs.terms.yields_to) == ("team.my study", "team.ours", ("team.x",))
    assert documents.study_spec(theirs, "team", "home")["name"] == "my study"
    assert documents.study_spec(theirs, "team", "home")["yieldsTo"] == ["x"]
    with pytest.raises(InvalidStudyTerms, match="weight"):
        study({"weight": -1})


@given(st.text(min_size=1, max_size=80), st.integers(0, 10**9))
def test_names_are_names_and_tell_studies_apart(study: str, number: int) -> None:
    name = trial_object_name(study, number)
    assert is_name(name)
    assert trial_object_name(study + "x", number) != name
    assert object_name(name, 50) == name
