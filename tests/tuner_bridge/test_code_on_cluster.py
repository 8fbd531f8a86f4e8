"""A sweep's code on its way to machines that do not have it: packed, kept by the scheduler, unpacked by a replica."""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dist_core.errors import ControlChannelError
from dist_core.link.client import ControlChannel
from scheduler.api.packages import PackageRefused, Packages
from tests.support.channel import channel_to
from trials.inside import user_code
from trials.inside.packages import python_path, unpack
from trials.spec import TrialSpec
from tuner_bridge.driving import sent_code
from tuner_bridge.driving.sent_code import CodeOnCluster, pack
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.in_replica.shipped import ShippedCode, receive_from


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for path, words in {
        "tune.py": "import helper",
        "package/helper.py": "x = 1",
        ".git/config": "secret",
        "env/pyvenv.cfg": "home = /usr",
        "env/lib/big.py": "x" * 1000,
        "sweep.db": "database",
        "data/large.bin": "0" * 1000,
        ".elastuneignore": "data/\n!data/keep.txt\n# a comment\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(words)
    (folder / "run.sh").write_text("echo hello")
    (folder / "run.sh").chmod(0o755)
    return folder


def spec(folder: Path, **changes: Any) -> TrialSpec:
    made = TrialSpec(study="s", number=0, entrypoint="m:f", working_dir=str(folder))
    return replace(made, **changes)


class Handed:
    """A scheduler that hands out one file."""

    def __init__(self, content: bytes, status: int = 200) -> None:
        self.content, self.status, self.asked = content, status, 0

    def channel(self) -> ControlChannel:
        def answer(request: httpx2.Request) -> httpx2.Response:
            self.asked += 1
            assert request.headers["authorization"] == "Bearer secret"
            return httpx2.Response(self.status, content=self.content)

        return channel_to(answer)


def test_a_folder_arrives_as_it_was_without_what_nobody_needs(project: Path, tmp_path: Path) -> None:
    package = pack(project)
    unpack(Handed(package.content).channel(), package.digest, tmp_path / "there")
    found = {
        path.relative_to(tmp_path / "there").as_posix() for path in (tmp_path / "there").rglob("*") if path.is_file()
    }
    assert found == {"tune.py", "package/helper.py", "run.sh", ".elastuneignore"}
    assert os.access(tmp_path / "there" / "run.sh", os.X_OK)


def test_links_arrive_as_what_they_lead_to_within_the_folder(project: Path, tmp_path: Path) -> None:
    (project / "common").symlink_to(project / "package")
    (project / "package" / "up").symlink_to(project)
    (project / "one.py").symlink_to(project / "tune.py")
    package = pack(project)
    unpack(Handed(package.content).channel(), package.digest, tmp_path / "there")
    assert (tmp_path / "there" / "common" / "helper.py").read_text() == "x = 1"
    assert (tmp_path / "there" / "one.py").read_text() == "import helper"
    assert not (tmp_path / "there" / "package" / "up").exists()


def fill(folder: Path, files: dict[str, str]) -> None:
    for path, words in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(words)


def test_nothing_outside_the_folder_is_sent_by_a_link(project: Path, tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", {"secret.txt": "s", "layers.py": "x = 1"})
    (project / "common").symlink_to(tmp_path / "elsewhere")
    (project / "one.py").symlink_to(tmp_path / "elsewhere" / "layers.py")
    (project / "loop").symlink_to(project / "loop")
    package = pack(project)
    assert {name for name, _ in package.files} == {".elastuneignore", "package/helper.py", "run.sh", "tune.py"}
    assert [name for name, _ in package.left_out] == ["common/", "one.py"]
    assert f"left out   one.py: is a link to {tmp_path / 'elsewhere' / 'layers.py'}, outside" in str(package)


def test_secrets_and_state_folders_are_never_sent(project: Path) -> None:
    secrets = {
        ".env": "TOKEN=1",
        ".env.local": "TOKEN=1",
        "package/.netrc": "machine",
        ".aws/credentials": "key",
        ".ssh/id_ed25519": "key",
        "server.pem": "key",
        "deep/down/kaggle.json": "{}",
        "looks_harmless.txt": "\n-----BEGIN OPENSSH PRIVATE KEY-----\nabc",
        "state/token": "t",
        "state/server.json": "{}",
        "state/logs/a.log": "l",
    }
    fill(project, secrets)
    (project / "settings").symlink_to(project / ".aws")
    (project / "settings.txt").symlink_to(project / ".env")
    (project / ".elastuneignore").write_text("!.env\n!.aws/\n!*.pem\ndata/\n")
    package = pack(project)
    assert {name for name, _ in package.files} == {".elastuneignore", "package/helper.py", "run.sh", "tune.py"}
    left_out = dict(package.left_out)
    assert {".env", ".aws/", ".ssh/", "server.pem", "state/", "settings/", "settings.txt"} <= set(left_out)
    assert left_out["looks_harmless.txt"] == "is a private key"
    assert left_out["state/"] == "is a scheduler's state folder"


def test_gitignore_is_honoured_where_it_lies_and_elastuneignore_has_the_last_word(project: Path) -> None:
    fill(
        project,
        {
            ".gitignore": "*.bin\n/weights/\nwanted/\nlogs/\n!logs/\n",
            "package/.gitignore": "!kept.bin\nlocal.py\n",
            "package/kept.bin": "k",
            "package/local.py": "l",
            "package/deep/local.py": "l",
            "local.py": "l",
            "a.bin": "a",
            "weights/w.txt": "w",
            "package/weights/w.txt": "w",
            "wanted/w.txt": "w",
            "logs/l.txt": "l",
            ".elastuneignore": "data/\n!wanted/\n",
        },
    )
    assert {name for name, _ in pack(project).files} == {
        ".elastuneignore",
        ".gitignore",
        "local.py",
        "logs/l.txt",
        "package/.gitignore",
        "package/helper.py",
        "package/kept.bin",
        "package/weights/w.txt",
        "run.sh",
        "tune.py",
        "wanted/w.txt",
    }


def test_a_folder_within_a_repository_heeds_what_the_repository_ignores(tmp_path: Path) -> None:
    fill(tmp_path / "repository", {".git/config": "", ".gitignore": "*.bin\n/lab/large/\n"})
    fill(tmp_path / "repository/lab", {"tune.py": "t", "a.bin": "a", "large/l.txt": "l"})
    fill(tmp_path, {".gitignore": "*.py"})
    assert [name for name, _ in pack(tmp_path / "repository" / "lab").files] == ["tune.py"]


def test_what_is_sent_is_listed_with_sizes(project: Path) -> None:
    (project / "model.txt").write_bytes(b"0" * 3000)
    for number in range(sent_code.MOST_LISTED):
        (project / f"n{number:02}\n\x1b[31m.txt").write_text("x" * 100)
    listed = str(pack(project)).splitlines()
    assert listed[0].startswith(f"{sent_code.MOST_LISTED + 5} files with 6.9 KiB, packed to ")
    assert "    2.9 KiB  model.txt" in listed
    assert "      100 B  n00\\n.txt" in listed
    assert "  and 5 smaller ones" in listed


def test_the_same_folder_gives_the_same_package(project: Path) -> None:
    first = pack(project)
    os.utime(project / "tune.py", (1, 1))
    assert pack(project) == first
    (project / "tune.py").write_text("import other")
    assert pack(project).digest != first.digest


def test_a_folder_that_is_too_large_is_refused_with_what_makes_it_so(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_code, "LARGEST_BYTES", 500)
    (project / "model.bin").write_bytes(b"0" * 600)
    with pytest.raises(InvalidSweep, match=r"model\.bin"):
        pack(project)


def test_what_is_not_what_was_sent_is_not_unpacked(project: Path, tmp_path: Path) -> None:
    package = pack(project)
    with pytest.raises(OSError, match="digest"):
        unpack(Handed(package.content + b"x").channel(), package.digest, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_package_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    evil = tmp_path / "evil.tar.gz"
    (tmp_path / "x").write_text("x")
    with tarfile.open(evil, "w:gz") as archive:
        archive.add(tmp_path / "x", arcname="../outside")
    digest = hashlib.sha256(evil.read_bytes()).hexdigest()
    with pytest.raises(tarfile.TarError):
        unpack(Handed(evil.read_bytes()).channel(), digest, tmp_path / "there")
    assert not (tmp_path / "outside").exists()


def test_a_scheduler_that_has_no_such_package_is_believed(tmp_path: Path) -> None:
    handed = Handed(b'{"detail": "gone"}', status=410)
    with pytest.raises(ControlChannelError, match="gone"):
        unpack(handed.channel(), "a" * 64, tmp_path / "there")
    assert handed.asked == 1


# ---------------------------------------------------------------------- at the scheduler


def put(packages: Packages, digest: str, content: bytes) -> None:
    arriving = packages.begin(digest)
    try:
        arriving.add(content[:10])
        arriving.add(content[10:])
        arriving.keep()
    finally:
        arriving.close()


def test_a_package_is_kept_under_its_digest_and_nothing_else(project: Path, tmp_path: Path) -> None:
    packages = Packages(tmp_path / "kept")
    package = pack(project)
    assert packages.find(package.digest) is None
    put(packages, package.digest, package.content)
    kept = packages.find(package.digest)
    assert kept is not None
    assert kept.read_bytes() == package.content
    for digest in ("../../etc/passwd", "a" * 63, ""):
        assert packages.find(digest) is None
        with pytest.raises(PackageRefused):
            packages.begin(digest)
    with pytest.raises(PackageRefused, match="digest is"):
        put(packages, "a" * 64, package.content)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [package.digest]


# ---------------------------------------------------------------------- where it is found


def test_by_default_the_folder_is_packed_once(project: Path) -> None:
    code = CodeOnCluster.from_environ({"ELASTUNE_IMAGE": "mine:1"})
    first, second = code.place(spec(project)), code.place(spec(project, number=1))
    assert code.package is not None
    assert first.package == second.package == code.package.digest
    assert (first.image, first.moved_to) == ("mine:1", "")


def test_code_that_is_in_the_image_or_on_a_volume_is_not_packed(project: Path) -> None:
    assert CodeOnCluster.from_environ({"ELASTUNE_CODE": "image"}).place(spec(project)).package == ""
    moved = CodeOnCluster.from_environ({"ELASTUNE_CODE": "/workspace"}).place(spec(project))
    assert (moved.package, moved.moved_to) == ("", "/workspace")
    with pytest.raises(InvalidSweep, match="ELASTUNE_CODE is 'nonsense'"):
        CodeOnCluster.from_environ({"ELASTUNE_CODE": "nonsense"})


def test_paths_of_a_moved_folder_are_found(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_code.MOVED, f"/home/me={project}")
    assert user_code.moved_path("/home/me/tune.py") == str(project / "tune.py")
    assert user_code.moved_path("/home/mean/tune.py") == "/home/mean/tune.py"
    here = python_path(["/home/me/package", "/home/me/missing", "/x/site-packages", str(project)], user_code.moved_path)
    assert here == [str(project / "package"), str(project)]


def test_what_an_image_lacks_is_named_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = b"csurely_not_installed\nobjective\n."
    code = ShippedCode(
        pickle=hashlib.sha256(content).hexdigest(),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        machine="another",
        main={},
        process={},
    )
    (tmp_path / code.pickle).write_bytes(content)
    monkeypatch.setenv("ELASTUNE_IMAGE", "mine:1")
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(ModuleNotFoundError, match="the image mine:1 does not have it"):
        receive_from(code, tmp_path.joinpath)
