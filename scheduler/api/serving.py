"""The API as a server that strangers cannot wear out."""

from __future__ import annotations

import logging
from typing import Any

import uvicorn

from scheduler.api.app import create_app
from scheduler.api.connections import BACKLOG, PatientProtocol, raise_descriptor_limit
from scheduler.api.service import Service

KEEP_ALIVE_SECONDS = 75


def api_config(service: Service, **options: Any) -> uvicorn.Config:
    raise_descriptor_limit()
    # A stranger's broken request is answered; a line for each would fill the disk.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return uvicorn.Config(
        create_app(service),
        http=PatientProtocol,
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
        **options,
    )
