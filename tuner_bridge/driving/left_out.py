"""Files of a working folder that stay where they are when a sweep is sent to a cluster, and why.

Secrets, state folders and what lies behind links that lead outside never go. Version control, environments and caches
do not, and neither does what ``.gitignore`` files name, unless ``.elastuneignore``, which has the last word, says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pathspec

IGNORE_FILE = ".elastuneignore"
SECRETS = (
    ".env",
    ".env.*",
    "*.env",
    ".envrc",
    ".netrc",
    "_netrc",
    ".pgpass",
    ".pypirc",
    ".npmrc",
    ".git-credentials",
    ".aws/",
    ".azure/",
    ".config/gcloud/",
    ".docker/",
    ".gnupg/",
    ".kube/",
    ".ssh/",
    "kubeconfig",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.keystore",
    "*.kdbx",
    "*.ovpn",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    "credentials",
    "credentials.ini",
    "credentials.json",
    "credentials.toml",
    "credentials.y*ml",
    "client_secret*.json",
    "*service[-_]account*.json",
    "kaggle.json",
    ".secrets*",
    "secrets.ini",
    "secrets.json",
    "secrets.toml",
    "secrets.txt",
    "secrets.y*ml",
    "*.tfstate",
    "*.tfstate.*",
)
USELESS = (
    ".git/",
    ".hg/",
    ".svn/",
    ".venv/",
    "venv/",
    "__pycache__/",
    "*.pyc",
    "*.egg-info/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".hypothesis/",
    ".ipynb_checkpoints/",
    ".elastune/",
    "node_modules/",
    "lightning_logs/",
    "mlruns/",
    "wandb/",
    "*.db",
    "*.db-journal",
    "*.db-wal",
    "*.db-shm",
)
STATE_FILES = ("server.json", "token")
"""Files of a scheduler's state folder; its token opens everything."""


@dataclass(slots=True)
class Walk:
    """Files of a folder that may be packed, in order of name; those left out are noted in ``left_out``."""

    folder: Path
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Names that somebody might miss, each with the reason: secrets, state folders and links."""
    _gitignores: dict[str, pathspec.GitIgnoreSpec] = field(default_factory=dict)
    """Ignore files by the folder that each lies in."""
    _above: list[tuple[str, pathspec.GitIgnoreSpec]] = field(default_factory=list)
    """Ignore files of the repository that the folder is a part of, nearest first, each with the way down from there."""

    def __post_init__(self) -> None:
        root = self.folder.resolve()
        above = [root, *root.parents]
        repository = next((number for number, each in enumerate(above) if (each / ".git").exists()), 0)
        for each in above[1 : repository + 1]:
            self._above.append((f"{root.relative_to(each).as_posix()}/", _read_ignores(each / ".gitignore")))

    def __iter__(self) -> Iterator[Path]:
        root = self.folder.resolve()
        secrets = pathspec.GitIgnoreSpec.from_lines(SECRETS)
        useless = pathspec.GitIgnoreSpec.from_lines(USELESS)
        own = _read_ignores(self.folder / IGNORE_FILE)
        for parent, folders, names in os.walk(self.folder, followlinks=True):
            below = Path(parent)
            here = below.resolve()
            where = "" if below == self.folder else below.relative_to(self.folder).as_posix()
            self._gitignores[where] = _read_ignores(below / ".gitignore")
            kept = []
            for name in sorted(folders):
                path = f"{where}/{name}" if where else name
                target = _real(below / name)
                if secrets.match_file(f"{path}/"):
                    self.left_out.append((f"{path}/", "may hold secrets"))
                elif all((target / each).exists() for each in STATE_FILES):
                    self.left_out.append((f"{path}/", "is a scheduler's state folder"))
                elif self._is_ignored(f"{path}/", own, useless) or (target / "pyvenv.cfg").exists():
                    # An environment says so itself, whatever it is called.
                    continue
                elif not target.is_relative_to(root):
                    self.left_out.append((f"{path}/", f"is a link to {target}, outside"))
                elif secrets.match_file(f"{target.relative_to(root).as_posix()}/"):
                    self.left_out.append((f"{path}/", f"is a link to {target}, which may hold secrets"))
                elif not here.is_relative_to(target):
                    kept.append(name)
            folders[:] = kept
            for name in sorted(names):
                path = f"{where}/{name}" if where else name
                target = _real(below / name)
                if not target.is_file() or self._is_ignored(path, own, useless):
                    continue
                if secrets.match_file(path):
                    self.left_out.append((path, "may hold secrets"))
                elif not target.is_relative_to(root):
                    self.left_out.append((path, f"is a link to {target}, outside"))
                elif secrets.match_file(target.relative_to(root).as_posix()):
                    self.left_out.append((path, f"is a link to {target}, which may hold secrets"))
                else:
                    yield below / name

    def _is_ignored(self, path: str, own: pathspec.GitIgnoreSpec, useless: pathspec.GitIgnoreSpec) -> bool:
        said = own.check_file(path).include
        if said is not None:
            return said
        # The .gitignore that lies nearest decides, as git has it.
        for parent in PurePosixPath(path).parents:
            where = "" if parent == PurePosixPath(".") else parent.as_posix()
            gitignore = self._gitignores.get(where)
            said = None if gitignore is None else gitignore.check_file(_within(path, where)).include
            if said is not None:
                return said
        for down, gitignore in self._above:
            said = gitignore.check_file(down + path).include
            if said is not None:
                return said
        return useless.match_file(path)


def holds_private_key(content: bytes) -> bool:
    """Tell whether a file is a key by its first line, whatever it is called."""
    return content.lstrip()[:11] == b"-----BEGIN " and b"PRIVATE KEY" in content[:200]


def _real(path: Path) -> Path:
    """Resolve links; one that leads to itself stays where it is."""
    return Path(os.path.realpath(path))


def _within(path: str, where: str) -> str:
    return path[len(where) + 1 :] if where else path


def _read_ignores(path: Path) -> pathspec.GitIgnoreSpec:
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else ()
    return pathspec.GitIgnoreSpec.from_lines(lines)
