"""Certificates of servers: what cannot be is refused in a line, and told once."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import serve

from tests.infer.conftest import write_question
from tests.infer.fake_realtime import FakeServer


@contextlib.contextmanager
def running(server: Any) -> Iterator[Any]:
    """A server in a thread, and what it gives."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_that_is_no_public_one_can_be_trusted(run, tmp_path: Path):
    names = ("-subj", "/CN=omni", "-addext", "subjectAltName=IP:127.0.0.1")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "key.pem", "-out", "own.pem"]
    subprocess.run([*made, *names], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "key.pem")

    class Guarded(FakeServer):
        async def __aenter__(self) -> str:
            self._server = await serve(self._talk, "127.0.0.1", 0, ssl=context)
            return f"wss://127.0.0.1:{next(iter(self._server.sockets)).getsockname()[1]}"

    write_question(tmp_path / "question.wav", 0.2)
    with running(Guarded()) as url:
        check = ("conformance", url, "--only", "created", "--timeout", "4")
        done = run(*check)
        assert done.code == 2 and "its certificate is not trusted" in done.err and "--certificate FILE" in done.err
        assert run(*check, "--certificate", "own.pem").code == 0


MISTAKES = {
    "no file": (["conformance", "wss://a", "--certificate", "none.pem"], "--certificate 'none.pem' cannot be read"),
    "no certificate": (["conformance", "wss://a", "--certificate", "text"], "give a PEM file"),
    "no TLS": (["conformance", "ws://a", "--certificate", "text"], "begins with wss://"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_certificate_that_cannot_be_is_refused(run, tmp_path: Path, name: str):
    words, said = MISTAKES[name]
    (tmp_path / "text").write_text("no certificate")
    done = run(*words)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1
