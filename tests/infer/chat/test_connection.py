"""A chat with a server: over a real WebSocket, to a stand-in for the server."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.server import ServerConnection as Socket
from websockets.sync.server import serve

from infer.chat.connection import KEY, ServerConnection, socket_address
from omni.errors import UserError


@pytest.fixture
def echo() -> Iterator[tuple[str, list[Any]]]:
    """A server that answers each event with itself, and ends with an empty one; its address, and the requests that came."""
    requests: list[Any] = []

    def handle(socket: Socket) -> None:
        requests.append(socket.request)
        for message in socket:
            if message == "{}":
                socket.close(1001, "enough")
            else:
                socket.send(message)

    with serve(handle, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", requests
        server.shutdown()


def test_events_go_and_come_and_the_end_is_told(echo: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    address, requests = echo
    monkeypatch.setenv(KEY, "secret")
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    connection = ServerConnection(address, came.put)
    connection.send({"type": "input_audio_buffer.clear"})
    assert came.get(timeout=5) == {"type": "input_audio_buffer.clear"}
    assert requests[0].path == "/v1/realtime" and requests[0].headers["authorization"] == "Bearer secret"
    connection.send({})
    error = came.get(timeout=5)
    assert isinstance(error, UserError) and "the server has ended the session" in str(error) and "enough" in str(error)
    connection.send(json.loads("{}"))  # nothing is raised by what comes too late
    connection.close()


def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(UserError, match="--server 'http://127.0.0.1:1' cannot be reached"):
        ServerConnection("http://127.0.0.1:1", lambda event: None)


@pytest.mark.parametrize(
    ("address", "socket"),
    [
        ("http://localhost:8000/", "ws://localhost:8000/v1/realtime"),
        ("https://example.org/v1/realtime?model=x", "wss://example.org/v1/realtime?model=x"),
        ("wss://example.org", "wss://example.org/v1/realtime"),
    ],
)
def test_addresses(address: str, socket: str) -> None:
    assert socket_address(address) == socket
