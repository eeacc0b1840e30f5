"""The command beside crowds and attackers, against the clock: the figures that docs/serving.md's limits are for."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import soundfile

from tests.infer.serve.test_connections import CONTINUED, PING, TEXT, dial, frame, rest_of, upgraded
from tests.infer.serve.test_proxy import ROOT, answers
from tests.infer.serve.test_server import event, opened
from tests.processes import free_port

pytestmark = pytest.mark.long

LONGEST_GAP = 0.08
"""Seconds beyond those that nobody causes, on a machine where other programs run."""
ATTACK_SECONDS = 6.0


@pytest.fixture
def start(folder: Any) -> Iterator[Callable[..., tuple[str, psutil.Process]]]:
    """Start a server; its address without a scheme, and its process."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(files: int | None = None) -> tuple[str, psutil.Process]:
        port = free_port()
        words = [sys.executable, "-m", "infer", "serve", str(folder), "--port", port]
        few = None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        running.append(subprocess.Popen(words, cwd=ROOT, preexec_fn=few))
        answers(f"http://127.0.0.1:{port}/ready", seconds=180)
        return f"127.0.0.1:{port}", psutil.Process(running[-1].pid)

    yield begin
    for process in running:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def flood(place: str, begin: bytes, repeated: bytes, reads: bool) -> None:
    """Send as fast as it goes, until it is closed or the time is over."""
    until = time.monotonic() + ATTACK_SECONDS
    with upgraded(place) as sock, contextlib.suppress(OSError):
        sock.settimeout(ATTACK_SECONDS)
        sock.sendall(begin)
        while time.monotonic() < until:
            sock.send(repeated * 2000)
            if reads:
                sock.recv(65536, socket.MSG_DONTWAIT)


FLOODS = {
    "pings": (b"", frame(PING), True),
    "pings, never reading": (b"", frame(PING, b"x" * 125), False),
    "empty continuations": (frame(TEXT, b"a", final=False), frame(CONTINUED, final=False), False),
    "short continuations": (frame(TEXT, b"a", final=False), frame(CONTINUED, b"a", final=False), False),
    "short messages": (b"", frame(TEXT, b"1"), False),
}


async def longest_gap(place: str, process: psutil.Process, attack: Callable[[], None]) -> tuple[float, int]:
    """Longest wait of another client for an answer while somebody attacks, and bytes by which the process grew."""
    gaps: list[float] = []
    async with opened(place) as ws:
        thread = threading.Thread(target=attack)
        before = process.memory_info().rss
        thread.start()
        while thread.is_alive():
            began = time.monotonic()
            await ws.send(json.dumps({"type": "input_audio_buffer.clear"}))
            await event(ws, "input_audio_buffer.cleared")
            gaps.append(time.monotonic() - began)
            await asyncio.sleep(0.04)
        return max(gaps), process.memory_info().rss - before


@pytest.mark.parametrize("name", FLOODS)
def test_one_sockets_flood_silences_nobody(start: Any, name: str) -> None:
    place, process = start()
    alone, _ = asyncio.run(longest_gap(place, process, lambda: time.sleep(ATTACK_SECONDS)))
    gap, grew = asyncio.run(longest_gap(place, process, lambda: flood(place, *FLOODS[name])))
    assert gap - alone <= LONGEST_GAP and grew <= 5 * 2**20, (gap, grew)


def test_a_large_body_of_small_values_silences_nobody(start: Any) -> None:
    place, process = start()
    body = b"{}" * (12 * 2**20)

    def post() -> None:
        with dial(place) as sock:
            sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
            for at in range(0, len(body), 2**18):
                sock.sendall(body[at : at + 2**18])
            assert b"413" in sock.recv(100)

    alone, _ = asyncio.run(longest_gap(place, process, lambda: time.sleep(ATTACK_SECONDS)))
    assert asyncio.run(longest_gap(place, process, post))[0] - alone <= LONGEST_GAP


@pytest.mark.parametrize(("rate", "status"), [(192_000, 200), (655_350, 400)])
def test_uploads_at_once_take_the_memory_of_two(start: Any, rate: int, status: int) -> None:
    place, process = start()
    sound = io.BytesIO()
    soundfile.write(sound, np.zeros((29 * rate, 2), np.float32), rate, format="FLAC")

    def upload(_: int) -> int:
        files = {"file": ("a.flac", sound.getvalue())}
        return httpx.post(f"http://{place}/v1/audio/transcriptions", files=files, timeout=120).status_code

    rest = peak = process.memory_info().rss
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(upload, number) for number in range(24)]
        while not all(one.done() for one in asked):
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.005)
    assert [one.result() for one in asked] == [status] * 24
    assert peak - rest <= 600 * 2**20, (peak - rest) / 2**20


@pytest.mark.parametrize(("files", "count"), [(None, 3000), (256, 400)])
def test_connections_without_a_request_hinder_nobody(start: Any, files: int | None, count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    place, _ = start(files)
    idle = []
    for _ in range(count):
        idle.append(dial(place))
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: loc")
    last = time.monotonic()
    assert httpx.get(f"http://{place}/health").status_code == 200
    spoken = {"model": "omni", "input": "seven", "voice": "default", "response_format": "wav"}
    assert httpx.post(f"http://{place}/v1/audio/speech", json=spoken, timeout=30).status_code == 200
    assert all(rest_of(sock) == b"" for sock in idle) and time.monotonic() - last < 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
