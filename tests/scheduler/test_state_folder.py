"""A state folder has tokens, and keeps itself out of the repository that it lies in."""

from __future__ import annotations

import subprocess
from pathlib import Path

from scheduler.state_folder import StateFolder


def test_git_sees_nothing_of_a_state_folder(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    folder = StateFolder.acquire(tmp_path / ".elastune" / "study")
    (folder.path / "token").write_text("secret")
    seen = subprocess.check_output(["git", "-C", str(tmp_path), "status", "--porcelain", "-uall"], text=True)
    assert seen == ""
    folder.release()
