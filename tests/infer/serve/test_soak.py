"""What clients may do wrong, at random and often: malformed events, and sockets that go away at any moment."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import psutil
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from infer.serve.realtime.protocol import TYPES
from tests.infer.serve.conftest import MANUAL, noise, pcm
from tests.infer.serve.test_server import answer, ask, emptied, event, opened, send, serve
from tests.realtime.client import written

__all__ = ["serve"]

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 1e308, float("nan"), 0.5, "", "x", "root", "auto", "none", "inf"),
    *("audio/pcm", "audio/pcmu", "server_vad", "semantic_vad", "message", "user", "assistant", "input_text", "\x00", "\ud800"),
    *("é" * 50, "A" * 2001, [], {}, [None], [[[]]], {"type": "input_text"}, {"type": None}, {"a": {"b": {}}}, ["audio"]),
)
NAMES = (
    *("type", "session", "audio", "input", "output", "format", "rate", "voice", "turn_detection", "threshold", "eagerness"),
    *("prefix_padding_ms", "silence_duration_ms", "idle_timeout_ms", "item", "item_id", "id", "role", "content", "text"),
    *("transcript", "previous_item_id", "content_index", "audio_end_ms", "response", "conversation", "metadata", "event_id"),
    *("output_modalities", "max_output_tokens", "instructions", "tools", "tool_choice", "transcription", "omni", "call_id"),
)


def anything(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = chance.random()
    if depth < 4 and kind < 0.45:
        return {chance.choice(NAMES): anything(chance, depth + 1) for _ in range(chance.randint(0, 5))}
    if depth < 4 and kind < 0.55:
        return [anything(chance, depth + 1) for _ in range(chance.randint(0, 3))]
    return chance.choice(VALUES)


def odd_event(chance: random.Random) -> str | bytes:
    """An event of a client in which something is wrong, or perhaps nothing."""
    kind = chance.random()
    if kind < 0.05:
        return chance.randbytes(chance.randint(0, 200))
    name = chance.choice(TYPES) if chance.random() < 0.95 else "response.creat"
    if name == "response.create" and chance.random() < 0.9:
        name = "session.update"  # answers take longer than all else
    event: dict[str, Any] = {"type": name}
    if name == "input_audio_buffer.append":
        event["audio"] = chance.choice([pcm(noise(0.02)), "AAA", "=", "AAAAAA==", *VALUES])
    for key in chance.sample(NAMES, chance.randint(0, 4)):
        if key != "type":
            event[key] = anything(chance)
    text = json.dumps(event)
    if kind < 0.15:
        place = chance.randint(0, len(text))
        return text[:place] + chance.choice(["", '"', "{", "\\", "\x01"]) + text[place + chance.randint(0, 3) :]
    return text


async def fuzz(talk: Any, count: int, seed: int) -> None:
    chance, errors = random.Random(seed), 0
    async with talk() as client:
        for number in range(count):
            before = len(client.events)
            await client.session.handle(odd_event(chance))
            came = client.events[before:]
            failed = [one["error"] for one in came if one["type"] == "error"]
            errors += bool(failed)
            assert not any("the server failed" in error["message"] for error in failed), failed
            if number % 500 == 499:
                client.events.clear()
                for item in list(client.session.items):
                    await client.send("conversation.item.delete", item_id=item.id)
        assert errors > count / 4
        if client.session.responses.active is not None:
            await client.send("response.cancel")
        await client.send("session.update", session={**MANUAL, "output_modalities": ["text"], "max_output_tokens": "inf"})
        done = await client.ask("still there?", conversation="none", input=[written("still there?")])
        assert done["status"] in ("completed", "incomplete"), done


async def test_malformed_events_are_told_and_end_nothing(talk: Any) -> None:
    await fuzz(talk, 1500, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
async def test_a_hundred_thousand_malformed_events(talk: Any, seed: int) -> None:
    await fuzz(talk, 10_000, seed)


async def misuse(place: str, chance: random.Random) -> None:
    """One socket that does something, and goes in some way."""
    try:
        async with opened(place, max_queue=None) as ws:  # with a full queue it would not read the answer to its close
            await send(ws, "session.update", session=MANUAL)
            for _ in range(chance.randint(0, 3)):
                await send(ws, "input_audio_buffer.append", audio=pcm(noise(0.15)))
            if chance.random() < 0.6:
                await send(ws, "input_audio_buffer.commit")
                await send(ws, "response.create")
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.random() * 0.15)
                if chance.random() < 0.5:
                    await send(ws, "response.cancel")
            way = chance.random()
            if way < 0.5:
                ws.transport.abort()
            elif way < 0.6:
                ws.transport.write(b"\xff\xff\xff")  # no frame
            elif way < 0.7:
                ws.transport.write_eof()
                await asyncio.sleep(0.01)
    except (ConnectionClosed, OSError):
        pass


@pytest.mark.long
async def test_ten_thousand_sockets_that_go_away_leave_nothing(serve: Any) -> None:
    count, together = 10_000, 20
    place, server = serve(sessions=200, key_sessions=200, key_events=10**9)
    process = psutil.Process()
    sizes: list[int] = []
    async with opened(place) as witness:  # goes on talking all the time
        chance, started = random.Random(0), 0
        while started < count:
            await asyncio.gather(*(misuse(place, chance) for _ in range(together)))
            started += together
            if started % (count // 5) < together:
                assert (await answer(witness, seconds=0.2))["status"] in ("completed", "incomplete")
                sizes.append(process.memory_info().rss)
    assert emptied(server, 20)
    assert server.host.stats().active == 0
    assert sizes[-1] < 1.05 * sizes[1], [size >> 20 for size in sizes]


@pytest.mark.long
async def test_a_thousand_idle_sockets_and_large_appends_leave_the_others_their_time(serve: Any) -> None:
    place, server = serve(sessions=1100, key_sessions=1100, session_bytes=10**9)
    process = psutil.Process()
    idle = await asyncio.gather(*(connect(f"ws://{place}/v1/realtime", compression=None) for _ in range(1000)))
    before = process.memory_info().rss
    large = json.dumps({"type": "input_audio_buffer.append", "audio": "A" * (20 * 2**20)})  # 15 MiB of sound
    async with opened(place) as ws, opened(place, max_size=None) as other:
        for _ in range(5):
            await other.send(large)
            error = await event(other, "error")
            assert error["error"]["code"] in ("input_audio_buffer_full", "string_above_max_length")
            began = time.monotonic()
            await ask(ws, seconds=0.2)
            await event(ws, "response.output_audio.delta")
            assert time.monotonic() - began < 1
            await event(ws, "response.done")
    assert process.memory_info().rss - before < 400 * 2**20
    assert server.metrics.registry.get_sample_value("omni_sent_underruns_total") == 0
    await asyncio.gather(*(one.close() for one in idle))
    assert emptied(server, 30)
