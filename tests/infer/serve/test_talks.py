"""A model that was taught six questions, behind the server, and the OpenAI library that asks them aloud."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from infer.serve.host import EngineHost
from infer.serve.settings import Answering, ServerLimits, ServeSettings
from omni.generate.speech_lm import SpeechLM
from tests.infer.serve.conftest import MANUAL
from tests.infer.serve.talking import AGAIN, ANSWERS, CONVERSATIONS, COUNT, RATE, ask_aloud, teach
from tests.infer.serve.test_server import serve  # noqa: F401

AT_ONCE = 60.0
"""Seconds of sound ahead of what is played: answers come as fast as they are made."""


@pytest.fixture(scope="module")
def taught() -> SpeechLM:
    return teach()


@pytest.fixture(scope="module")
def host(taught: SpeechLM) -> EngineHost:
    made = EngineHost(lambda: taught)
    made.open()
    return made


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> ServeSettings:
    """Those of a server, whose lead a test may choose."""
    lead = getattr(request, "param", AT_ONCE)
    return ServeSettings(model="taught", lead=lead, limits=ServerLimits(), answering=Answering(max_seconds=6.0))


@dataclass(frozen=True)
class Heard:
    """An answer as its client has it: the item's id, the words, and the seconds of its sound."""

    item: str
    text: str
    seconds: float
    status: str


class Caller:
    """Talks over one connection of the OpenAI library."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def send(self, sound: np.ndarray) -> None:
        """Send samples [S] at 24 kHz, int16."""
        await self.connection.input_audio_buffer.append(audio=base64.b64encode(sound.tobytes()).decode())

    async def say(self, question: str) -> None:
        """Ask aloud, at once."""
        await self.send(ask_aloud(question))
        await self.connection.input_audio_buffer.commit()
        await self.connection.response.create()

    async def ask(self, question: str) -> Heard:
        """Ask aloud, and hear the whole answer."""
        await self.say(question)
        return await self.hear()

    async def hear(self) -> Heard:
        """The next answer, up to its end."""
        sound = 0
        while True:
            event = await self.next("response.output_audio.delta", "response.done")
            if event.type == "response.done":
                item = event.response.output[0]
                return Heard(item.id, item.content[0].transcript, sound / 2 / RATE, event.response.status)
            sound += len(base64.b64decode(event.delta))

    async def next(self, *types: str) -> Any:
        """The next event of one of these types; any error fails."""
        while True:
            event = await asyncio.wait_for(self.connection.recv(), 20)
            assert event.type != "error", event
            if event.type in types:
                return event

    async def cut(self, item: str, seconds: float) -> str:
        """Say that only the first seconds of an answer were heard; the words that the conversation keeps of it."""
        await self.connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=round(1000 * seconds))
        await self.next("conversation.item.truncated")
        return await self.kept(item)

    async def kept(self, item: str) -> str:
        """The transcript of an item as the server has it now."""
        await self.connection.conversation.item.retrieve(item_id=item)
        return (await self.next("conversation.item.retrieved")).item.content[0].transcript


@asynccontextmanager
async def microphone(caller: Caller) -> AsyncIterator[Callable[[str], None]]:
    """Send sound as it is spoken, silence where nobody speaks; what it gives says a question."""
    said = np.zeros(0, np.int16)

    def say(question: str) -> None:
        nonlocal said
        said = np.concatenate([said, ask_aloud(question)])

    async def run() -> None:
        nonlocal said
        due, piece = time.monotonic(), RATE // 25
        while True:
            now, said = said[:piece], said[piece:]
            await caller.send(np.pad(now, (0, piece - len(now))))
            due += 0.04
            await asyncio.sleep(due - time.monotonic())

    running = asyncio.create_task(run())
    yield say
    running.cancel()


def listening(detection: Any, **more: Any) -> Any:
    """A session's change: how turns end."""
    return {"type": "realtime", "audio": {"input": {"turn_detection": detection, **more}}}


@asynccontextmanager
async def called(place: str, session: Any = MANUAL) -> AsyncIterator[Caller]:
    async with AsyncOpenAI(base_url=f"http://{place}/v1", api_key="none").realtime.connect(model="omni") as connection:
        caller = Caller(connection)
        await connection.session.update(session=session)
        await caller.next("session.updated")
        yield caller


@pytest.fixture
def talk(serve: Any) -> Callable[..., Any]:  # noqa: F811
    """Run a coroutine function with a caller of a server of its own."""

    def run(body: Callable[[Caller], Coroutine[Any, Any, Any]], session: Any = MANUAL) -> Any:
        place, _ = serve()

        async def whole() -> Any:
            async with called(place, session) as caller:
                return await asyncio.wait_for(body(caller), 60)

        return asyncio.run(whole())

    return run


@pytest.mark.parametrize("questions", CONVERSATIONS, ids=" / ".join)
def test_three_spoken_turns_are_answered_right(talk: Any, questions: tuple[str, ...]) -> None:
    async def body(caller: Caller) -> None:
        said = ""
        for question in questions:
            said = ANSWERS.get(question, said)
            answer = await caller.ask(question)
            assert (answer.text, answer.status) == (said, "completed")
            assert len(said.split()) * 0.1 < answer.seconds < len(said.split()) * 0.4

    talk(body)


@pytest.mark.parametrize("seconds", [(0.7, 1.5)])
def test_what_was_heard_of_a_cut_answer_is_said_again(talk: Any, seconds: tuple[float, ...]) -> None:
    async def body(caller: Caller, until: float) -> str:
        whole = await caller.ask(COUNT)
        assert whole.text == ANSWERS[COUNT] and whole.seconds > until
        heard = await caller.cut(whole.item, until)
        assert (await caller.ask(AGAIN)).text == heard
        assert (await caller.ask("who are you")).text == ANSWERS["who are you"]
        return heard

    few, more = (talk(partial(body, until=one)) for one in seconds)
    assert 0 < len(few) < len(more) < len(ANSWERS[COUNT])
    assert ANSWERS[COUNT].startswith(more) and more.startswith(few)


@pytest.mark.parametrize("settings", [0.3], indirect=True)
def test_an_answer_is_cut_while_it_is_sent(talk: Any) -> None:
    async def body(caller: Caller) -> None:
        await caller.say(COUNT)
        sent, item = 0.0, ""
        while sent < 1.3:
            event = await caller.next("response.output_audio.delta")
            sent, item = sent + len(base64.b64decode(event.delta)) / 2 / RATE, event.item_id
        heard = await caller.cut(item, sent - 0.4)
        assert 0 < len(heard) < len(ANSWERS[COUNT]) and ANSWERS[COUNT].startswith(heard)
        assert (await caller.ask(AGAIN)).text == heard

    talk(body)


@pytest.mark.parametrize("settings", [0.3], indirect=True)
def test_a_spoken_question_interrupts(talk: Any) -> None:
    async def body(caller: Caller) -> None:
        async with microphone(caller) as say:
            say(COUNT)
            item = (await caller.next("response.output_audio.delta")).item_id
            await asyncio.sleep(0.6)
            say(AGAIN)
            cut = await caller.hear()
            assert (cut.item, cut.status) == (item, "cancelled")
            answer = await caller.hear()
            heard = await caller.kept(item)
        assert 0 < len(heard) < len(ANSWERS[COUNT]) and ANSWERS[COUNT].startswith(heard)
        assert (answer.text, cut.text) == (heard, heard)

    talk(body, listening({"type": "server_vad", "silence_duration_ms": 300}))


def test_questions_are_written_down(talk: Any) -> None:
    async def body(caller: Caller) -> None:
        for question in ("who are you", AGAIN):
            await caller.say(question)
            ends = ("conversation.item.input_audio_transcription.completed", "response.done")
            found = [await caller.next(*ends), await caller.next(*ends)]
            assert [event.transcript for event in found if event.type == ends[0]] == [question]

    talk(body, listening(None, transcription={"model": "whisper-1"}))
