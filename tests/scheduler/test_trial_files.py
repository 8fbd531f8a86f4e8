"""Files of trials: prepared data that nobody needs any more, and states that are handed on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from dist_core.state.checkpoint import load_checkpoint, write_checkpoint
from dist_core.state.manifests import STATE, newest_parts
from dist_core.state.parts import newest_in_parts
from scheduler.loop.trial_files import PREPARED_SECONDS, SPARED_SECONDS, TrialFiles
from trials.launch import InMemoryLauncher
from trials.record import Study, TrialRecord
from trials.spec import TrialSpec
from trials.store import TrialStore
from trials.terms import StudyTerms


def test_data_of_unknown_studies_is_forgotten_and_of_known_ones_kept(tmp_path: Path) -> None:
    store, now = TrialStore(), 0.0
    store.put_study(Study(name="a b", direction="minimize", terms=StudyTerms(), owner=None, owner_seen_at=0.0))
    files = TrialFiles(tmp_path, store, InMemoryLauncher({}), lambda: now)
    known, gone, young = (files.prepared_dir(name) for name in ("a b", "a/b", "c"))
    assert len({known, gone, young}) == 3 and all(each.parent == tmp_path / "prepared" for each in (known, gone))
    long_ago = time.time() - SPARED_SECONDS - 1
    for folder in (known, gone, young):
        (folder / "data").mkdir(parents=True)
        if folder != young:
            os.utime(folder, (long_ago, long_ago))
    files.forget_prepared()
    assert gone.exists()
    now = PREPARED_SECONDS
    files.forget_prepared()
    assert known.exists() and young.exists() and not gone.exists()


def test_a_state_that_is_removed_while_it_is_handed_on_is_no_state_for_the_child(tmp_path: Path) -> None:
    """Its parent may have written two newer ones between the scheduler's look at it and the link."""
    files = TrialFiles(tmp_path, TrialStore(), InMemoryLauncher({}), time.monotonic, one_machine=True)
    parent = files.checkpoint_dir("parent")
    write_checkpoint(parent, 1, {"weight": torch.ones(2)}, {"epoch": 1})
    child = TrialRecord(trial_id="child", spec=TrialSpec(study="s", number=1, entrypoint="a.b:c", parent="parent"))
    present = newest_parts(parent, flushed=False)
    (present[0][0] / STATE).unlink()
    assert not files.hand_on(child)
    assert not files.newest_checkpoint("child")
    write_checkpoint(parent, 2, {"weight": torch.ones(2)}, {"epoch": 2})
    assert files.hand_on(child)
    paths, manifest = newest_in_parts(files.checkpoint_dir("child")) or pytest.fail("the child has no state")
    assert manifest["summary"] == {"epoch": 2, "left": True, "parent": "parent"}
    assert load_checkpoint(paths[0])["weight"].tolist() == [1.0, 1.0]
