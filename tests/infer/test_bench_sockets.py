"""`omni-infer bench --server`, and certificates of servers: what cannot be is refused in a line, and told once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.server import serve

from infer.bench.sockets import Noted, SocketPerson
from tests.infer.conftest import write_question
from tests.realtime.fake_server import FakeServer, own_certificate, running


@contextlib.asynccontextmanager
async def refusing(code: int, reason: str) -> Any:
    """A server that closes every session."""

    async def talk(socket: Any) -> None:
        await socket.send(json.dumps({"type": "error", "error": {"message": reason}}))
        await socket.close(code, reason)

    async with serve(talk, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/v1"


@pytest.mark.few(1)
@pytest.mark.parametrize("code", [1008, 1013])
def test_why_a_server_takes_no_session_is_told_once(run, code):
    with running(refusing(code, "this server takes no more")) as url:
        done = run("bench", "--server", url, "--play_seconds", "2", "--sessions", "2")
    assert done.code == 2 and done.err.count("this server takes no more") == 1 and "is a server there" not in done.err
    assert f"{url} closed a session (code {code}): this server takes no more" in done.err
    done = run("bench", "--server", "ws://127.0.0.1:1/v1")
    assert done.code == 2 and "is a server there?" in done.err


@pytest.mark.parametrize("turns", ["server_vad", "semantic_vad"])
def test_noise_ends_no_turn(run, turns):
    done = run("bench", "--server", "ws://127.0.0.1:1/v1", "--turns", turns)
    assert done.code == 2 and f"--turns {turns} needs speech" in done.err and "--question FILE" in done.err


def test_a_certificate_that_is_no_public_one_can_be_trusted(run, tmp_path: Path):
    certificate = own_certificate(tmp_path)
    write_question(tmp_path / "question.wav", 0.2)
    with running(FakeServer(certificate=certificate)) as url:
        talk = ("bench", "--server", f"{url}/v1", "--sessions", "1", "--play_seconds", "0.2", "--question", "question.wav")
        done = run(*talk)
        assert done.code == 2 and "its certificate is not trusted" in done.err and "is a server there" not in done.err
        assert "not trusted" not in run(*talk, "--certificate", certificate).err


MISTAKES = {
    "no file": (["bench", "--server", "wss://a", "--certificate", "none.pem"], "--certificate 'none.pem' cannot be read"),
    "no certificate": (["bench", "--server", "wss://a", "--certificate", "text"], "give a PEM file"),
    "no TLS": (["bench", "--server", "ws://a/v1", "--certificate", "text"], "begins with wss://"),
    "no server": (["bench", "--certificate", "text"], "are for a server"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_certificate_that_cannot_be_is_refused(run, tmp_path: Path, name: str):
    words, said = MISTAKES[name]
    (tmp_path / "text").write_text("no certificate")
    done = run(*words)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1


def test_an_answer_that_has_ended_is_not_waited_for():
    """Nor is its sound, which may all have come while its listener was silent."""

    async def body() -> None:
        person = SocketPerson("ws://nowhere", None, np.zeros(2400, np.float32), "server_vad", 1.0, Noted(), 0)
        person._over.set()
        await asyncio.wait_for(person._answered(True), 5)
        await asyncio.wait_for(person._answered(False), 5)
        person._over.clear()
        person._sounding.set()
        await asyncio.wait_for(person._answered(True), 5)

    asyncio.run(body())
