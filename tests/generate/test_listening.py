"""Law 14 in conversations: a question that was heard while it came is answered and remembered as the same question whole."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.config import ProjectorConfig
from omni.edit.deltas import Delta, Edits
from omni.engine.prefill_ahead import Listen
from omni.engine.stepping import Requests
from omni.errors import SoundWarning
from omni.generate.listening import FeatureStream
from omni.generate.results import Clock
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.lora.attach import activate, add_adapter
from omni.lora.config import LoRAConfig
from tests.engine.test_listen_process import Here
from tests.generate.conftest import LAYOUTS, SHAPES, adapt
from tests.generate.listening_toys import (
    CHUNK,
    QUESTIONS,
    TALK,
    equal_conversations,
    heard,
    left,
    listener,
    lm,
    same_cache,
    sound,
    wait_until_heard,
)
from tests.generate.session_toys import answered, inside, same
from tests.soon import soon

__all__ = ["left", "lm"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_heard_while_it_comes_equals_the_whole(layout: str, shape: str, wait: bool) -> None:
    equal_conversations(listener(layout, **SHAPES[shape]), wait)


@pytest.mark.long
@pytest.mark.parametrize("cores", [1, 64])
def test_whoever_encodes_the_rest(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """The stepping thread, or who asks; of what was heard, of what came too fast to be heard, and of nothing."""
    monkeypatch.setattr("omni.engine.engine.cores", lambda: cores)
    equal_conversations(lm, False, turns=5)
    equal_conversations(lm, True, turns=5)
    advance = FeatureStream.advance
    for most in (0, 1, 3):  # chunks that the engine finds time for before the end
        count = [0]

        def some(self: FeatureStream, count: list[int] = count, most: int = most) -> bool:
            if threading.current_thread().name == "omni-engine" and count[0] < most:
                count[0] += 1
                return advance(self)
            return False

        with lm.session(**TALK) as session, lm.session(**TALK) as other:
            listening = session.listen()
            listening.push(sound(2.0))
            with monkeypatch.context() as patch:
                patch.setattr(FeatureStream, "advance", some)
                assert soon(lambda: count[0] == most)  # noqa: B023
            same(session.ask(listening).answer(), other.ask(sound(2.0)).answer())
            same_cache(lm, session, other)


def test_the_time_counts_from_the_question_s_end(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    started: list[bool] = []

    def coming() -> Iterator[Tensor]:
        yield sound(1.0)
        ended.append(True)

    class Watched(Clock):
        def __init__(self, *values: Any) -> None:
            started.append(bool(ended))
            super().__init__(*values)

    monkeypatch.setattr("omni.generate.session.Clock", Watched)
    with lm.session(**TALK) as session:
        timings = session.ask(coming()).answer().timings
    assert started == [True] and 0 < timings.encode <= timings.prefill <= (timings.first_audio or 0)


@pytest.mark.long
@pytest.mark.parametrize("stack", [1, 3])
def test_frames_that_fill_no_feature_are_held_back(stack: int) -> None:
    projector = ProjectorConfig("gated", hidden=24, stack=stack)
    equal_conversations(listener(projector=projector), True, turns=4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"text_assist": True}, {"system": "be brief"}, {"context": 200, "overflow": "forget"}])
@pytest.mark.parametrize("shape", SHAPES)
def test_with_options_of_the_conversation(options: dict[str, Any], shape: str) -> None:
    equal_conversations(listener(**SHAPES[shape]), True, turns=11, **options)


@pytest.mark.long
def test_with_adapters_and_edits() -> None:
    lm = listener()
    adapt(lm.model, ("decoder.blocks.*", "encoder.*"), "warm")
    delta = Delta(torch.randn(1, lm.config.decoder.width), torch.randn(1, 48))
    edits = Edits({"decoder.blocks.1.mlp.down": delta})
    with lm.session(adapter="warm", edits=edits, **TALK) as one, lm.session(adapter="warm", edits=edits, **TALK) as other:
        for turn in range(5):
            same(heard(lm, one, *QUESTIONS[turn], wait=True), other.ask(*QUESTIONS[turn]).answer())
        same_cache(lm, one, other)
    with lm.session(adapter="warm", **TALK) as one, lm.session(**TALK) as other:
        assert heard(lm, one, *QUESTIONS[0], wait=True).tokens != other.ask(*QUESTIONS[0]).answer().tokens


def test_an_adapter_that_changes_meanwhile_has_the_whole_encoded_again(lm: SpeechLM) -> None:
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        listening = session.listen()
        listening.push(QUESTIONS[0][0][:10_000])
        wait_until_heard(lm)
        add_adapter(lm.model, LoRAConfig(("encoder.*",), rank=2), "late")
        activate(lm.model)
        listening.push(QUESTIONS[0][0][10_000:])
        same(session.ask(listening).answer(), other.ask(QUESTIONS[0][0]).answer())
        same_cache(lm, session, other)


def test_a_projector_that_is_gated_by_task() -> None:
    lm = listener(projector=ProjectorConfig("mmoe", stack=2, settings={"experts": 2}))
    equal_conversations(lm, True, turns=5)
    with lm.session(**TALK) as session, lm.session(**TALK) as other:  # and one that is asked as another task
        listening = session.listen("A1T2")
        listening.push(QUESTIONS[0][0])
        wait_until_heard(lm)
        same(session.ask(listening, "A1A2").answer(), other.ask(QUESTIONS[0][0], "A1A2").answer())
        same_cache(lm, session, other)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rate", [8_000, 24_000, 44_100])
def test_other_rates_types_and_two_channels(lm: SpeechLM, rate: int) -> None:
    mono = (sound(1.2) * 20_000).to(torch.int16)
    for question in (mono, torch.stack([mono, mono // 2]), torch.stack([mono, -mono])):  # the last cancel each other
        with lm.session(**TALK) as session, lm.session(**TALK) as other, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", SoundWarning)
            listening = session.listen(sample_rate=rate)
            for piece in question.split(701, dim=-1):
                listening.push(piece)
            wait_until_heard(lm)
            same(session.ask(listening).answer(), other.ask(question, sample_rate=rate).answer())
            assert len(told) == 2 * (question is not mono and int(question.sum()) == 0)
            (one,), (two,) = inside(session)._past, inside(other)._past
            assert one.clip is not None and two.clip is not None
            torch.testing.assert_close(one.clip, two.clip, rtol=1e-6, atol=1e-6)


def test_iterators_are_heard_by_every_face(lm: SpeechLM) -> None:
    question = QUESTIONS[0][0]
    with lm.session(**TALK) as session:
        wanted = session.ask(question).answer()
    heard_in: list[int] = []
    encode = FeatureStream._encode

    def watched(self: FeatureStream, samples: int, last: bool = False) -> None:
        heard_in.append(samples)
        encode(self, samples, last)

    def coming() -> Iterator[Tensor]:
        for piece in question.split(2_000):
            yield piece
            wait_until_heard(lm)

    async def coming_async() -> AsyncIterator[Tensor]:
        for piece in coming():
            await asyncio.sleep(0)
            yield piece

    async def events_of(session: Session, asked: Any) -> str:
        return "".join([getattr(event, "text", "") async for event in session.ask(asked)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureStream, "_encode", watched)
        ways: list[Callable[[Session], Any]] = [
            lambda s: s.ask(coming()).answer().text,
            lambda s: "".join(getattr(event, "text", "") for event in s.ask(coming())),
            lambda s: asyncio.run(answered(s, coming())).text,
            lambda s: asyncio.run(answered(s, coming_async())).text,
            lambda s: asyncio.run(events_of(s, coming_async())),
        ]
        for way in ways:
            heard_in.clear()
            with lm.session(**TALK) as session:
                assert way(session) == wanted.text
                assert heard_in == [2560] * 6 + [len(question) - 6 * 2560]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"context": 200, "overflow": "forget"}])
def test_only_the_last_chunk_and_the_markers_are_left(left: list[int], options: dict[str, Any], shape: str) -> None:
    lm = listener(**SHAPES[shape])
    with lm.session(**TALK | options) as session:
        for turn in range(6):
            heard(lm, session, sound(0.3 + 0.37 * turn, turn), "A1A2", wait=True)
            assert left[-1] <= CHUNK + 2, turn


def test_so_it_is_after_a_history_that_nobody_heard(lm: SpeechLM, left: list[int]) -> None:
    with lm.session(**TALK) as first:
        for question, task in QUESTIONS:
            first.ask(question, task).answer()
        history = first.history
    with lm.session(history=history, **TALK) as session, lm.session(history=history, **TALK) as other:
        listening = session.listen()
        wait_until_heard(lm)  # the history is fed as soon as somebody speaks
        listening.push(sound(0.5))
        wait_until_heard(lm)
        same(session.ask(listening).answer(), other.ask(sound(0.5)).answer())
        assert left[-2] <= CHUNK + 2 < left[-1]


def test_so_it_is_after_an_answer_that_was_interrupted_while_it_came(lm: SpeechLM, left: list[int]) -> None:
    long = TALK | {"max_seconds": 30.0, "max_tokens": 500, "pace": "live"}
    with lm.session(**long) as session, lm.session(**long) as other:
        for one in (session, other):
            events = one.ask(sound(0.4))
            for _ in range(5):
                next(events)
            listening = one.listen() if one is session else None
            if listening is not None:
                listening.push(sound(1.0, 4)[:9_000])
            one.cancel(0.1)
            if listening is not None:
                listening.push(sound(1.0, 4)[9_000:])
                wait_until_heard(lm)
            events = one.ask(sound(1.0, 4) if listening is None else listening)
            next(events)
            one.cancel()
        assert left[1] <= CHUNK + 2 < left[3]
        assert session.turns[0].text == other.turns[0].text


def test_listens_take_turns(lm: SpeechLM) -> None:
    requests = Requests()
    with lm.session() as one, lm.session() as two:
        for session in (one, two):
            session._listen = lambda: None  # type: ignore[method-assign]
        seats = [inside(one)._seat, inside(two)._seat]
        every = [Listen(seat, FeatureStream(lm.model, "A1A2"), ()) for seat in seats if seat is not None]
        for each in every:
            requests.listen(each)
        assert requests.listening() == every
        requests.later(every[0])
        assert requests.listening() == every[::-1]
        every[0].stream.closed = True
        assert requests.listening() == [every[1]]
        del requests.listens[every[1].seat]
        requests.later(every[1])
        assert not requests.listening()


SAMPLES = 2560
"""Samples of a chunk at 16 kHz."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["here", "another process"])
def test_it_is_answered_as_the_whole_chunks_that_came(where: str, left: list[int]) -> None:
    lm = listener()
    question = sound(2.5, 4)
    engine: Any = lm if where == "here" else Here(lm)
    with engine.session(**TALK) as session, engine.session(**TALK) as beside, lm.session(**TALK) as other:
        listening = session.listen("A1A2")
        for number, piece in enumerate(question.split(8_000), 1):
            listening.push(piece)
            wait_until_heard(lm)
            if where != "here":
                while lm.engine.requests.listening()[0].stream.sound.shape[0] < 8_000 * number:
                    pass
                wait_until_heard(lm)
            heard = question[: 8_000 * number // SAMPLES * SAMPLES]
            for task in ("A1T1", "A1A2"):
                with lm.session(**TALK) as alone:
                    wanted = alone.ask(heard, task).answer()
                events = list(beside.ask(listening.so_far(), task))
                assert "".join(getattr(event, "text", "") for event in events) == wanted.text
                beside.end(beside._last, "withdraw")
            if number > 1 and task == "A1A2":
                assert left[-1] <= 8_000 // SAMPLES * 4 + 8  # only what came since, and the columns after it
        assert beside.history == []
        same(session.ask(listening).answer(), other.ask(question).answer())


def test_the_engine_has_time_to_spare_only_while_nobody_needs_it() -> None:
    lm = listener()
    assert lm.engine.spare
    with lm.session(**TALK | {"max_seconds": 30.0, "max_tokens": 4000}) as session, lm.session(**TALK) as listener_:
        events = session.ask(sound(0.5))
        next(events)
        assert not lm.engine.spare  # a program reads
        session.cancel()
        list(events)
        assert lm.engine.spare
        listening = listener_.listen()
        lm.engine.requests.listen = lambda given: None  # type: ignore[method-assign]
        lm.engine.requests.listening()[0].stream._waiting = torch.zeros(SAMPLES)
        assert not lm.engine.spare  # somebody speaks who was not heard yet
        listening.drop()
        assert lm.engine.spare
