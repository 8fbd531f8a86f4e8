"""A study whose trials want the same data prepares it once, and keeps it where the study lies."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from tests.support import prepared_code
from tuner_bridge import optimize


@pytest.mark.slow
def test_a_studys_trials_prepare_their_data_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the data take their time, so that several are made at once."""
    monkeypatch.setenv("PREPARED_NOTES", str(tmp_path))
    study = optuna.create_study(study_name="all/of it", sampler=optuna.samplers.RandomSampler(seed=0))
    options = {"n_jobs": 2, "slots": 2, "state_dir": tmp_path / "state"}
    optimize(study, prepared_code.objective, n_trials=3, **options)  # type: ignore[arg-type]  # of several kinds
    whole = sum(range(prepared_code.ROWS))
    assert [each.value for each in study.trials] == [each.params["scale"] * whole for each in study.trials]
    parts = sorted(int(line) for line in (tmp_path / "made").read_text().split())
    assert parts == list(range(prepared_code.PARTS))
    logs = [path.read_text() for path in (tmp_path / "state" / "logs").rglob("*.log")]
    assert sum("is being prepared: 12 of 12 parts are missing" in log for log in logs) >= 1
    [folder] = (tmp_path / "state" / "prepared").iterdir()
    assert folder.name.startswith("all-of-it-")
    optimize(study, prepared_code.objective, n_trials=1, **options)  # type: ignore[arg-type]
    assert len((tmp_path / "made").read_text().split()) == prepared_code.PARTS
