"""Sessions that have ended: nothing holds them, also where the garbage collector never looks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from infer.serve.host import EngineHost
from infer.serve.realtime.responses import Response
from infer.serve.realtime.session import RealtimeSession
from infer.serve.realtime.state import ConversationItem
from infer.serve.settings import ServeSettings
from tests.infer.serve.caller import no_session, session_of
from tests.infer.serve.conftest import MANUAL, Client, noise, opened_client, pcm
from tests.infer.serve.test_server import answer, emptied, event, opened, serve
from tests.realtime.client import written
from tests.soon import soon

__all__ = ["serve"]

Doing = Callable[[Client], Coroutine[Any, Any, None]]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


async def ask(client: Client, seed: int = 0, seconds: float = 0.5) -> None:
    since = len(client.events)
    await client.send("input_audio_buffer.append", audio=pcm(noise(seconds, seed)))
    await client.send("input_audio_buffer.commit")
    await client.send("response.create")
    await client.until("response.done", since)


async def turns(client: Client) -> None:
    for seed in range(3):
        await ask(client, seed)
    await client.send("session.update", session={"audio": {"input": {"transcription": {"model": "any"}}}})
    await ask(client, 4)
    await client.until("conversation.item.input_audio_transcription.completed")


async def interrupted(client: Client) -> None:
    await ask(client)
    await client.send("conversation.item.create", item=written("more"))
    await client.send("response.create")
    await client.until("response.output_audio.delta", len(client.events))
    await client.session.responses.interrupt()
    await client.send("conversation.item.truncate", item_id=list(client.session.items)[1].id, content_index=0, audio_end_ms=0)


async def mistakes(client: Client) -> None:
    await client.send("response.create")  # nothing to answer
    await client.until("response.done")
    await client.send("session.update", session={"audio": 1})
    await client.send("conversation.item.create", item=written("x" * 90_000))  # more than the context
    await client.send("response.create")
    await client.send("response.create", response={"conversation": "none", "input": [written("beside")]})
    await client.send("conversation.item.delete", item_id="nobody")


async def broken_off(client: Client) -> None:
    """Closed in the midst of an answer, and of what is said."""
    await client.send("conversation.item.create", item=written("hello"))
    await client.send("response.create")
    await client.send("response.create", response={"conversation": "none", "input": [written("beside")]})
    await client.send("input_audio_buffer.append", audio=pcm(noise(0.4)))


def left(*kinds: type) -> list[Any]:
    return [one for one in gc.get_objects() if type(one) in kinds]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("doing", [turns, interrupted, mistakes, broken_off])
@pytest.mark.usefixtures("uncollected")
async def test_a_closed_session_is_freed_by_itself(host: EngineHost, settings: ServeSettings, doing: Doing) -> None:
    before = len(left(RealtimeSession, Response, ConversationItem))

    async def closed_session() -> weakref.ref[RealtimeSession]:
        async with opened_client(host, settings, MANUAL) as client:
            await asyncio.wait_for(doing(client), 30)
        return weakref.ref(client.session)

    gone = await closed_session()
    await asyncio.sleep(0.1)
    assert gone() is None
    assert len(left(RealtimeSession, Response, ConversationItem)) == before


@pytest.mark.usefixtures("uncollected")
async def test_a_closed_socket_leaves_no_session(serve: Any) -> None:
    place, server = serve()
    gone: list[weakref.ref[RealtimeSession]] = []
    async with opened(place) as ws:
        await answer(ws)
        gone.append(weakref.ref(next(iter(server.sessions.values()))))
        await ws.send("no JSON")
        await event(ws, "error")
    assert emptied(server)
    assert soon(lambda: gone[0]() is None)


@pytest.mark.long
@pytest.mark.usefixtures("uncollected")
async def test_a_call_that_has_ended_leaves_no_session(calls: Any) -> None:
    gone: list[weakref.ref[RealtimeSession]] = []
    async with calls() as (server, caller):
        await caller.call(MANUAL)
        since = await caller.ask()
        await caller.until("output_audio_buffer.stopped", since)
        since = await caller.ask()
        await caller.until("output_audio_buffer.started", since)
        caller.send("output_audio_buffer.clear")
        await caller.until("output_audio_buffer.cleared", since)
        since = await caller.ask()  # it is still heard when the call ends
        await caller.until("output_audio_buffer.started", since)
        gone.append(weakref.ref(session_of(server)))
        await caller.pc.close()
        await no_session(server)
        await asyncio.sleep(0.5)
        assert gone[0]() is None
