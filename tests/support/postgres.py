"""A PostgreSQL server of the tests' own: its data in a folder, one socket in it, no port."""

from __future__ import annotations

import getpass
import glob
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.waiting import until


def binary(name: str) -> str | None:
    """Debian keeps the server's programs off the PATH."""
    found = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"))
    return found[-1] if found else shutil.which(name)


@contextmanager
def postgres_server() -> Iterator[str]:
    """URL of an empty database. The server refuses to run as root, so it runs as somebody else then."""
    initdb, server = binary("initdb"), binary("postgres")
    assert initdb and server, "PostgreSQL is missing; on Debian and Ubuntu: apt install postgresql"
    user = "nobody" if os.geteuid() == 0 else getpass.getuser()
    as_user: dict[str, Any] = {"user": user, "group": pwd.getpwnam(user).pw_gid} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="elastune-postgres-"))
    if as_user:
        shutil.chown(folder, user)
    data = folder / "data"
    environ = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    initialise = [initdb, "-D", str(data), "-U", "elastune", "--auth=trust", "--no-sync", "-E", "UTF8"]
    subprocess.run(initialise, check=True, capture_output=True, env=environ, cwd=folder, **as_user)
    log = open(folder / "log", "wb")
    process = subprocess.Popen(
        [server, "-D", str(data), "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"],
        stdout=log,
        stderr=log,
        env=environ,
        cwd=folder,
        **as_user,
    )
    try:
        said = (folder / "log").read_text
        until(lambda: process.poll() is not None or "ready to accept connections" in said(), 30.0, said)
        assert process.poll() is None, said()
        yield f"postgresql+psycopg://elastune@/postgres?host={folder}"
    finally:
        process.send_signal(signal.SIGINT)  # without waiting for clients to leave
        process.wait(timeout=30.0)
        log.close()
        shutil.rmtree(folder)
