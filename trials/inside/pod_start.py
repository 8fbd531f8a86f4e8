"""The first code of a replica in a pod: bring its code into place, then run it as everywhere.

The code is in the image or on a volume, under the working folder's own name or where `moved_to` says; or it is a packed
copy of that folder, which the scheduler hands out and an empty volume under the folder's own name takes up, so that
paths mean the same as on the machine that the sweep was started on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tarfile
from pathlib import Path
from typing import Any

from dist_core.errors import EXIT_PEER_LOST, EXIT_PREEMPTED, ControlChannelError
from dist_core.link.client import ControlChannel
from dist_core.link.environment import ReplicaEnvironment
from trials.inside.packages import python_path, unpack
from trials.inside.replica_start import run_replica
from trials.inside.user_code import MOVED, moved_path


def main() -> int:
    # As process 1 of its container it would not even notice before a handler is there.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_PREEMPTED))
    start: dict[str, Any] = json.loads(os.environ["ELASTUNE_START"])
    environment = ReplicaEnvironment.from_environ()
    assert environment is not None
    channel = ControlChannel(environment)
    try:
        if start["package"]:
            unpack(channel, start["package"], Path(start["working_dir"]))
    except ControlChannelError as error:
        sys.stderr.write(f"replica ends: {error}\n")
        return EXIT_PEER_LOST
    except (OSError, tarfile.TarError) as error:
        # The trial may train elsewhere: it is the scheduler that judges what this means for it.
        sys.stderr.write(f"the packed working folder cannot be used on this node: {error}\n")
        return 1
    if start["moved_to"]:
        os.environ[MOVED] = f"{start['working_dir']}={start['moved_to']}"
    folder = moved_path(start["working_dir"])
    if not os.path.isdir(folder):
        # Code that is installed in the image needs no folder.
        folder = os.getcwd()
    request = {
        "working_dir": folder,
        "python_path": python_path(start["python_path"], moved_path),
        "entrypoint": start["entrypoint"],
    }
    os.environ["ELASTUNE_IMAGE"] = start["image"]
    return run_replica(request)


if __name__ == "__main__":
    sys.exit(main())
