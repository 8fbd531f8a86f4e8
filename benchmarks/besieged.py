"""Latency of a scheduler's answers while 500 connections are held by others.

200 strangers send half a head and wait, 150 send a byte a second, and dial again when they are hung up on; 150 who
have a token wait in long polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.frame import Measurement
from scheduler.host.embedded import EmbeddedScheduler

HALF_OPEN, SLOW, POLLING = 200, 150, 150
REQUESTS = 600
TARGET_SECONDS = 0.1


async def hold(host: str, port: int, first: bytes, then: bytes) -> None:
    """One connection, dialled again whenever it is closed."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(first)
                while not reader.at_eof():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(65536), 1.0)
                    writer.write(then)
                    await writer.drain()
            finally:
                writer.close()
        await asyncio.sleep(0.5)


async def besiege(url: str, token: str) -> None:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 0
    body = b'{"owner": "o", "wait": 8}'
    poll = (
        f"POST /studies/besieged/news HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    half = b"GET /trials HTTP/1.1\r\nHost: x\r\nAuthoriz"
    kinds = [(half, b"")] * HALF_OPEN + [(half, b"a")] * SLOW + [(poll, b"")] * POLLING
    tasks = [asyncio.create_task(hold(host, port, first, then)) for first, then in kinds]
    await asyncio.sleep(3.0)
    print("besieged", flush=True)
    await asyncio.gather(*tasks)


def answers(scheduler: EmbeddedScheduler) -> list[float]:
    """Seconds that each of many small requests took, sorted."""
    client = scheduler.start()
    client.request("PUT", "/studies/besieged", {"owner": "o"})
    times = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        client.request("GET", "/studies")
        times.append(time.perf_counter() - began)
        time.sleep(0.02)
    client.close()
    return sorted(times)


def measure() -> list[Measurement]:
    with tempfile.TemporaryDirectory() as folder:
        scheduler = EmbeddedScheduler(Path(folder), slots=1, fork_server=False)
        try:
            alone = answers(scheduler)
            client = scheduler.start()
            others = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.besieged", client.url, client.token],
                stdout=subprocess.PIPE,
            )
            client.close()
            assert others.stdout is not None and others.stdout.readline()
            try:
                besieged = answers(scheduler)
            finally:
                others.kill()
                others.wait()
                others.stdout.close()
        finally:
            scheduler.stop()
    last = round(0.99 * REQUESTS)
    return [
        Measurement(
            what="an answer while 500 connections are held, 99th percentile",
            ours=besieged[last],
            peer=TARGET_SECONDS,
            unit="s",
            peer_name="the goal",
            target=1.0,
        ),
        Measurement(
            what="an answer while 500 connections are held, median",
            ours=statistics.median(besieged),
            peer=statistics.median(alone),
            unit="s",
            peer_name="the same scheduler left alone",
            details={"alone_99th": alone[last]},
        ),
    ]


if __name__ == "__main__":
    asyncio.run(besiege(sys.argv[1], sys.argv[2]))
