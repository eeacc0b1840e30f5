"""Turns that the engine hears while they come: the answers are those of the committed sound."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from infer.serve.host import EngineHost
from infer.serve.realtime.hearing import InputBuffer
from infer.serve.settings import ServeSettings
from omni.codec.codec2 import Codec2Codec
from omni.generate.listening import FeatureStream
from omni.generate.question import Listening
from omni.generate.speech_lm import SpeechLM
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.generate.session_toys import inside
from tests.infer.conftest import TINY, tiny_model
from tests.infer.serve.caller import LocalEngine
from tests.infer.serve.conftest import MANUAL, Client, deltas, noise, sound_of, with_client
from tests.infer.serve.test_turns import append, at24, say
from tests.soon import soon

Body = Callable[[Client], Coroutine[Any, Any, Any]]
VAD = {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}}}
"""An interruption cuts the history by what was heard by then, which is another part each time."""


@pytest.fixture(scope="module")
def chunked() -> SpeechLM:
    config = replace(TINY, encoder=replace(TINY.encoder, mode="chunked", chunk_ms=160))  # type: ignore[type-var]
    model = SpeechModel(config).eval()
    model.load_state_dict(tiny_model().state_dict())
    return SpeechLM(model, Tokenizer.bytes(), Codec2Codec())


@pytest.fixture
def host(chunked: SpeechLM) -> Iterator[EngineHost]:
    host = EngineHost(lambda: LocalEngine(chunked))
    yield host
    assert host.stats().sessions == 0 and not chunked.engine.requests.listening()


@pytest.fixture
def run(host: EngineHost, settings: ServeSettings) -> Callable[..., Any]:
    def run(body: Body, given: dict[str, Any] = MANUAL) -> list[Any]:
        async def whole(client: Client) -> list[Any]:
            await body(client)
            said = [deltas(client.events), sound_of(client.events).tobytes()]
            return [*said, [item.seconds for item in client.session.items if item.role == "user"]]

        found: list[Any] = with_client(whole, host, settings, given)
        return found

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the sounds that were asked as they were heard."""
    found: list[float] = []
    end = Listening.asked

    def watched(self: Listening, *values: Any) -> Any:
        found.append(self.seconds)
        return end(self, *values)

    monkeypatch.setattr(Listening, "asked", watched)
    return found


def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineHost, "listens", property(lambda self: False))


async def three_turns(client: Client) -> None:
    for turn in range(3):
        await append(client, noise(0.9 + 0.3 * turn, turn))
        await client.send("input_audio_buffer.commit")
        await client.ask()


async def cleared(client: Client) -> None:
    """A buffer that is cleared is no question."""
    await append(client, noise(2.0, 7))
    await asyncio.sleep(0.05)
    await client.send("input_audio_buffer.clear")
    await three_turns(client)


async def other_options(client: Client) -> None:
    """Other options than were heard with ask the sound."""
    await append(client, noise(1.0))
    await client.send("input_audio_buffer.commit")
    await client.ask(max_output_tokens=5)
    await append(client, noise(1.0, 1))
    await client.send("input_audio_buffer.commit")  # and is never asked
    await client.ask("and?")


async def under_way(client: Client) -> None:
    """Sound comes while an answer is under way."""
    await append(client, noise(0.9))
    await client.send("input_audio_buffer.commit")
    await client.send("response.create")
    since = len(client.events)
    await append(client, noise(0.5, 1))
    await client.until("response.done", since)
    await append(client, noise(0.5, 2))
    await client.send("input_audio_buffer.commit")
    await client.ask()


async def another_format(client: Client) -> None:
    """The format changes midway."""
    await append(client, noise(0.5))
    change = {"type": "realtime", "audio": {"input": {"format": {"type": "audio/pcmu"}}}}
    await client.send("session.update", session=change)
    for start in range(0, 4000, 160):
        law = np.random.default_rng(start).integers(0, 256, 160).astype(np.uint8)
        await client.send("input_audio_buffer.append", audio=base64.b64encode(law.tobytes()).decode())
    await client.send("input_audio_buffer.commit")
    await client.ask()


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        (three_turns, [0.9, 1.2, 1.5]),
        (cleared, [0.9, 1.2, 1.5]),
        (other_options, []),
        (under_way, None),
        (another_format, [1.0]),
    ],
)
def test_what_is_heard_while_it_comes_is_answered_as_its_sound(
    run: Any, asked: list[float], monkeypatch: pytest.MonkeyPatch, body: Body, seconds: list[float] | None
) -> None:
    found = run(body)
    assert seconds is None or asked == pytest.approx(seconds, abs=0.01)
    count = len(asked)
    deaf(monkeypatch)
    assert run(body) == found and len(asked) == count


@pytest.mark.long
def test_found_turns_are_heard_before_they_are_committed(run: Any, asked: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    sounds = [at24(say(text)) for text in ("what is two plus three", "where is the cat")]
    lacking: list[int] = []

    async def body(client: Client) -> None:
        for sound in sounds:
            since = len(client.events)
            await append(client, sound)
            await client.until("response.done", since)

    end = Listening.asked

    def watched(self: Listening, *values: Any) -> Any:
        stream = inside(self.session).stream(self._sound)
        assert isinstance(stream, FeatureStream)
        soon(lambda: not stream.due, 5)
        lacking.append(len(stream._waiting))
        return end(self, *values)

    monkeypatch.setattr(Listening, "asked", watched)
    found = run(body, VAD)
    assert len(asked) == 2 and max(lacking) < 2 * 2560
    deaf(monkeypatch)
    wanted = run(body, VAD)
    assert found == wanted and asked == pytest.approx(found[2])


@pytest.mark.long
async def test_a_turn_that_interrupts_is_heard_too(talk: Any, asked: list[float]) -> None:
    given = {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
    async with talk(given) as client:
        for text in ("what is two plus three", "where is the cat"):
            since = len(client.events)
            await append(client, at24(say(text)))
            await client.until("response.done", since)
    assert len(asked) == 2


def test_parts_of_the_buffer() -> None:
    buffer = InputBuffer(60.0)
    samples = np.arange(10_000).astype(np.int16)
    for piece in np.split(samples, [10, 10, 4000, 9999]):
        buffer.add(piece)
    for first in (0.0, 100 / 24_000, 5000 / 24_000):
        begin = round(first * 24_000)
        for skip, last in ((0, 10_000), (0, 3), (50, 4001), (9990, 10_000), (20_000, 10_000), (0, 99_999)):
            assert np.array_equal(buffer.part(first, skip, last / 24_000), samples[begin + skip : last])
