"""The command as its operator sees it: the engine's process is killed, and the server is told to end."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.infer.serve.test_proxy import ROOT, answers
from tests.infer.serve.test_server import answer, ask, closed, event, opened, send
from tests.processes import free_port

pytestmark = pytest.mark.long


@pytest.fixture
def running(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server's address without a scheme, and its process."""
    port = free_port()
    words = [sys.executable, "-m", "infer", "serve", str(folder), "--port", port, "--max_seconds", "3"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    answers(f"http://127.0.0.1:{port}/ready")
    yield f"127.0.0.1:{port}", process
    process.terminate()
    process.wait(60)


def test_a_killed_engine_is_told_started_again_and_the_conversation_goes_on(running: Any) -> None:
    place, process = running

    async def body(kill: bool) -> list[str]:
        async with opened(place) as ws:
            said = [(await answer(ws, seed))["output"][0]["content"][0]["transcript"] for seed in (1, 2)]
            if kill:
                (engine,) = (
                    child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())
                )
                await ask(ws, 3)
                await event(ws, "response.output_audio.delta")
                engine.kill()
                seen: dict[str, Any] = {}
                while not {"error", "response.done"} <= seen.keys():  # in any order
                    came = json.loads(await asyncio.wait_for(ws.recv(), 20))
                    seen[came["type"]] = came
                assert "engine was lost" in seen["error"]["error"]["message"]
                failed = seen["response.done"]["response"]
                assert failed["status"] == "failed"
                answers(f"http://{place}/ready", seconds=60)
                await send(ws, "conversation.item.delete", item_id=failed["output"][0]["id"])
                await send(ws, "response.create")
                done = (await event(ws, "response.done"))["response"]
            else:
                done = await answer(ws, 3)
            return [*said, done["output"][0]["content"][0]["transcript"]]

    assert asyncio.run(body(kill=True)) == asyncio.run(body(kill=False))


async def test_sigterm_lets_answers_end_and_refuses_new_sessions(running: Any) -> None:
    place, process = running
    async with opened(place) as ws:
        await ask(ws, 1)
        await event(ws, "response.output_audio.delta")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        answers(f"http://{place}/ready", 503, 5)
        async with opened(place) as other:
            events, code = await closed(other)
            assert events[0]["error"]["code"] == "server_shutting_down" and code == 1013
        done = await event(ws, "response.done")
        assert done["response"]["status"] in ("completed", "incomplete")
        events, code = await closed(ws)
        assert events[-1]["error"]["code"] == "server_shutting_down" and code == 1012
        assert 1.5 < time.monotonic() - began < 15
    assert process.wait(20) in (0, 143)
    assert "Traceback" not in process.stderr.read()


async def test_two_signals_end_it_at_once_and_its_engine_with_it(running: Any) -> None:
    place, process = running
    children = psutil.Process(process.pid).children()
    async with opened(place) as ws:
        await ask(ws, 1)
        await event(ws, "response.output_audio.delta")
        process.send_signal(signal.SIGINT)
        answers(f"http://{place}/ready", 503, 5)
        process.send_signal(signal.SIGINT)
        await closed(ws)
    process.wait(10)
    psutil.wait_procs(children, 10)
    assert not any(child.is_running() for child in children)
