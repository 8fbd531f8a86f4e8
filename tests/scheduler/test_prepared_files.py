"""Prepared data goes when nobody knows its study any more."""

from __future__ import annotations

import os
import time
from pathlib import Path

from scheduler.loop.trial_files import PREPARED_SECONDS, SPARED_SECONDS, TrialFiles
from trials.launch import InMemoryLauncher
from trials.record import Study
from trials.store import InMemoryTrialStore
from trials.terms import StudyTerms


def test_data_of_unknown_studies_is_forgotten_and_of_known_ones_kept(tmp_path: Path) -> None:
    store, now = InMemoryTrialStore(), 0.0
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
