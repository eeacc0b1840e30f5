"""A model that was taught six questions, behind the server, and the OpenAI library that asks them aloud."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
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
from tests.infer.serve.caller import LocalEngine
from tests.infer.serve.conftest import MANUAL
from tests.infer.serve.talking import AGAIN, ANSWERS, CONVERSATIONS, COUNT, RATE, ask_aloud, spoken, teach
from tests.infer.serve.test_server import serve  # noqa: F401

pytestmark = pytest.mark.long

AT_ONCE = 60.0
"""Seconds of sound ahead of what is played: answers come as fast as they are made."""


@pytest.fixture(scope="module")
def taught() -> SpeechLM:
    return teach()


@pytest.fixture(scope="module")
def host(taught: SpeechLM) -> Iterator[EngineHost]:
    made = EngineHost(lambda: LocalEngine(taught))
    made.open()
    yield made
    made.close()


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> ServeSettings:
    """Those of a server, whose lead a test may choose."""
    lead = getattr(request, "param", AT_ONCE)
    return ServeSettings(model="taught", lead=lead, limits=ServerLimits(), answering=Answering(max_seconds=6.0))


@dataclass(frozen=True)
class StockAnswer:
    """An answer as its client has it: the item's id, the words, and the seconds of its sound."""

    item: str
    text: str
    seconds: float
    status: str


class StockCaller:
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

    async def ask(self, question: str) -> StockAnswer:
        """Ask aloud, and hear the whole answer."""
        await self.say(question)
        return await self.hear()

    async def hear(self) -> StockAnswer:
        """The next answer, up to its end."""
        sound = 0
        while True:
            event = await self.next("response.output_audio.delta", "response.done")
            if event.type == "response.done":
                item = event.response.output[0]
                return StockAnswer(item.id, item.content[0].transcript, sound / 2 / RATE, event.response.status)
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
        await self.truncate(item, seconds)
        await self.next("conversation.item.truncated")
        return await self.kept(item)

    async def truncate(self, item: str, seconds: float) -> None:
        await self.connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=round(1000 * seconds))

    async def kept(self, item: str) -> str:
        """The transcript of an item as the server has it now."""
        await self.connection.conversation.item.retrieve(item_id=item)
        return (await self.next("conversation.item.retrieved")).item.content[0].transcript


@asynccontextmanager
async def microphone(caller: StockCaller) -> AsyncIterator[Callable[[str], None]]:
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
async def called(place: str, session: Any = MANUAL) -> AsyncIterator[StockCaller]:
    async with AsyncOpenAI(base_url=f"http://{place}/v1", api_key="none").realtime.connect(model="omni") as connection:
        caller = StockCaller(connection)
        await connection.session.update(session=session)
        await caller.next("session.updated")
        yield caller


@pytest.fixture
def talk(serve: Any) -> Callable[..., Any]:  # noqa: F811
    """Run coroutine functions side by side, each with a caller of one server; what they return."""

    def run(*bodies: Callable[[StockCaller], Coroutine[Any, Any, Any]], session: Any = MANUAL) -> list[Any]:
        place, _ = serve()

        async def one(body: Callable[[StockCaller], Coroutine[Any, Any, Any]]) -> Any:
            async with called(place, session) as caller:
                return await asyncio.wait_for(body(caller), 60)

        async def whole() -> list[Any]:
            return await asyncio.gather(*map(one, bodies))

        return asyncio.run(whole())

    return run


def test_spoken_turns_are_answered_right_one_after_another(talk: Any) -> None:
    async def body(caller: StockCaller, questions: tuple[str, ...]) -> None:
        said = ""
        for question in questions:
            said = ANSWERS.get(question, said)
            answer = await caller.ask(question)
            assert (answer.text, answer.status) == (said, "completed")
            assert answer.seconds == pytest.approx(spoken(said).shape[1] / 25, abs=0.01)

    talk(*(partial(body, questions=questions) for questions in CONVERSATIONS))
    assert {*ANSWERS, AGAIN} == {question for questions in CONVERSATIONS for question in questions}


def test_what_was_heard_of_a_cut_answer_is_said_again(talk: Any) -> None:
    async def body(caller: StockCaller, seconds: float) -> str:
        whole = await caller.ask(COUNT)
        assert whole.text == ANSWERS[COUNT] and whole.seconds > seconds
        heard = await caller.cut(whole.item, seconds)
        assert (await caller.ask(AGAIN)).text == heard
        assert (await caller.ask("who are you")).text == ANSWERS["who are you"]
        return heard

    few, more = talk(partial(body, seconds=0.5), partial(body, seconds=1.1))
    assert 0 < len(few) < len(more) < len(ANSWERS[COUNT])
    assert ANSWERS[COUNT].startswith(more) and more.startswith(few)


@pytest.mark.parametrize("settings", [0.3], indirect=True)
def test_an_answer_is_cut_while_it_is_sent(talk: Any) -> None:
    async def body(caller: StockCaller) -> None:
        await caller.say(COUNT)
        sent, item = 0.0, ""
        while sent < 0.8:
            event = await caller.next("response.output_audio.delta")
            sent, item = sent + len(base64.b64decode(event.delta)) / 2 / RATE, event.item_id
        await caller.truncate(item, sent - 0.4)
        assert (await caller.hear()).status == "cancelled"
        await caller.next("conversation.item.truncated")
        heard = await caller.kept(item)
        assert 0 < len(heard) < len(ANSWERS[COUNT]) and ANSWERS[COUNT].startswith(heard)
        assert (await caller.ask(AGAIN)).text == heard

    talk(body)


@pytest.mark.parametrize("settings", [0.3], indirect=True)
def test_a_spoken_question_interrupts(talk: Any) -> None:
    async def body(caller: StockCaller) -> None:
        async with microphone(caller) as say:
            say(COUNT)
            item = (await caller.next("response.output_audio.delta")).item_id
            await asyncio.sleep(0.4)
            say(AGAIN)
            cut = await caller.hear()
            assert (cut.item, cut.status) == (item, "cancelled")
            answer = await caller.hear()
            heard = await caller.kept(item)
        assert 0 < len(heard) < len(ANSWERS[COUNT]) and ANSWERS[COUNT].startswith(heard)
        assert (answer.text, cut.text) == (heard, heard)

    talk(body, session=listening({"type": "server_vad", "silence_duration_ms": 300}))


def test_questions_are_written_down(talk: Any) -> None:
    async def body(caller: StockCaller) -> None:
        for question in ("who are you", AGAIN):
            await caller.say(question)
            ends = ("conversation.item.input_audio_transcription.completed", "response.done")
            found = [await caller.next(*ends), await caller.next(*ends)]
            assert [event.transcript for event in found if event.type == ends[0]] == [question]

    talk(body, session=listening(None, transcription={"model": "whisper-1"}))
