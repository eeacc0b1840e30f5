"""Two servers behind HAProxy, by the example configuration: sessions stay, overflow goes on, and one may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.infer.serve.test_server import KEY, answer, closed, opened
from tests.processes import free_port

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed (Debian's package haproxy)"),
]


def answers(url: str, status: int = 200, seconds: float = 60) -> None:
    """Wait until an address answers with a status."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url).status_code == status:
                return
        time.sleep(0.05)
    pytest.fail(f"{url} did not answer with {status}")


@pytest.fixture
def behind(folder: Path, tmp_path: Path) -> Iterator[tuple[str, dict[str, subprocess.Popen[bytes]]]]:
    """The proxy's address, and the servers behind it by their ports, each with room for two sessions."""
    (tmp_path / "keys").write_text(KEY)
    servers: dict[str, subprocess.Popen[bytes]] = {}
    text = (ROOT / "configs/haproxy.cfg").read_text()
    proxy = free_port()
    text = text.replace("bind :8080", f"bind 127.0.0.1:{proxy}")
    for given in (8001, 8002):
        port = free_port()
        text = text.replace(f"127.0.0.1:{given}", f"127.0.0.1:{port}")
        words = f"-m infer serve {folder} --port {port} --sessions 2 --key_file {tmp_path / 'keys'}".split()
        quiet: Any = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        servers[port] = subprocess.Popen([sys.executable, *words], cwd=ROOT, **quiet)
    (tmp_path / "haproxy.cfg").write_text(text)
    for port in servers:
        answers(f"http://127.0.0.1:{port}/ready")
    running = subprocess.Popen(["haproxy", "-f", str(tmp_path / "haproxy.cfg")], stderr=subprocess.DEVNULL)
    try:
        answers(f"http://127.0.0.1:{proxy}/ready")
        yield f"127.0.0.1:{proxy}", servers
    finally:
        running.terminate()
        running.wait()
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            server.wait(60)


async def talks(ws: Any) -> bool:
    return (await answer(ws, output_modalities=["text"]))["status"] in ("completed", "incomplete")


def sessions_of(port: str) -> int:
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return sum(int(float(count)) for count in re.findall(r"omni_sessions\{.*\} (\S+)", page))


async def test_sessions_stay_overflow_goes_on_and_a_killed_server_takes_only_its_own(behind: Any) -> None:
    place, servers = behind
    one, two = servers
    async with contextlib.AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(opened(place, KEY)) for _ in range(2)]
        assert [sessions_of(one), sessions_of(two)] == [1, 1]
        assert all([await talks(ws) for ws in sockets])
        sockets += [await stack.enter_async_context(opened(place, KEY)) for _ in range(2)]
        assert [sessions_of(one), sessions_of(two)] == [2, 2]
        answers(f"http://127.0.0.1:{one}/ready", 503, 5)
        await asyncio.sleep(1.2)  # until the proxy has seen that both are full
        with pytest.raises(Exception):  # noqa: B017 - the proxy's own 503
            async with opened(place, KEY):
                pass
        async with opened(f"127.0.0.1:{two}", KEY) as ws:  # one that came meanwhile
            events, code = await closed(ws)
            assert events[0]["error"]["code"] == "session_limit_reached" and code == 1013
        os.kill(servers[one].pid, signal.SIGKILL)
        servers[one].wait()
        lost = 0
        for ws in sockets:
            try:
                assert await talks(ws)
            except Exception:
                lost += 1
        assert lost == 2 and sessions_of(two) == 2
    answers(f"http://{place}/ready", 200, 10)  # those of the other have gone, and left room
    async with opened(place, KEY) as ws:
        assert await talks(ws)
    assert sessions_of(two) <= 1
