"""Sound that is dropped, stalls or is bad while it is heard, and slots for conversations that are listened to."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from omni.engine.engine import Engine
from omni.engine.stepping import Requests
from omni.errors import SoundWarning, UserError
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from tests.generate.conftest import LAYOUTS, make_lm
from tests.generate.listening_toys import (
    CHUNK,
    QUESTIONS,
    TALK,
    heard,
    listener,
    lm,
    same_cache,
    same_history,
    sound,
    wait_until_heard,
)
from tests.generate.session_toys import answered, inside, same
from tests.soon import soon

__all__ = ["lm"]


def test_a_sound_that_is_dropped_leaves_nothing(lm: SpeechLM) -> None:
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        for turn in range(4):
            listening = session.listen()
            listening.push(sound(2.0, 10 + turn))  # as long as the question that follows, or longer
            wait_until_heard(lm)
            if turn % 2:
                listening.drop()
                listening.drop()
                with pytest.raises(UserError, match="this sound was dropped"):
                    listening.push(sound(0.1))
                with pytest.raises(UserError, match="this sound was dropped"):
                    session.ask(listening)
            before = session.turns
            assert len(before) == turn
            same(heard(lm, session, *QUESTIONS[turn], wait=bool(turn % 3)), other.ask(*QUESTIONS[turn]).answer())
            same_cache(lm, session, other)
            same_history(session, other)
    assert not lm.engine.requests.listening()


def test_a_sound_is_asked_again_and_by_its_own_session(lm: SpeechLM) -> None:
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        listening = session.listen()
        listening.push(sound(0.7))
        with pytest.raises(UserError, match="another session"):
            other.ask(listening)
        with pytest.raises(UserError, match="asks in writing"):
            session.ask(listening, "T1A2")
        for task in ("A1A2", "A1T2"):
            same(session.ask(listening, task).answer(), other.ask(sound(0.7), task).answer())
        same_cache(lm, session, other)
        with pytest.raises(UserError, match="this sound was asked"):
            listening.push(sound(0.1))
        with pytest.raises(UserError, match="asks in writing"):
            session.listen("T1A2")


def test_a_written_question_meanwhile_and_a_listening_that_nobody_has_any_more(lm: SpeechLM) -> None:
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        listening = session.listen()
        listening.push(QUESTIONS[0][0][:9_000])
        wait_until_heard(lm)
        same(session.ask("go on", "T1A2").answer(), other.ask("go on", "T1A2").answer())
        listening.push(QUESTIONS[0][0][9_000:])
        wait_until_heard(lm)
        same(session.ask(listening).answer(), other.ask(QUESTIONS[0][0]).answer())
        same_cache(lm, session, other)
        listening = session.listen()
        listening.push(sound(1.0))
        wait_until_heard(lm)
        del listening
        assert inside(session)._hears is None and not lm.engine.requests.listening()
        same(session.ask(sound(0.5)).answer(), other.ask(sound(0.5)).answer())
        same_cache(lm, session, other)


def test_a_session_that_is_dropped_is_freed(lm: SpeechLM) -> None:
    session = lm.session(**TALK)
    listening = session.listen()
    listening.push(sound(1.0))
    wait_until_heard(lm)
    gone = weakref.ref(session)
    del session, listening
    gc.collect()
    assert gone() is None and not lm.engine.requests.listening()
    with lm.session(**TALK) as other:
        assert other.ask(sound(0.3)).answer().ended in ("end", "length")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_stream_that_stalls_blocks_nobody(lm: SpeechLM, end: str) -> None:
    stalled, on = threading.Event(), threading.Event()

    def coming() -> Iterator[Tensor]:
        yield sound(1.0)
        stalled.set()
        assert on.wait(20)
        yield sound(0.1)
        raise AssertionError

    found: list[Any] = []
    session = lm.session(**TALK)
    thread = threading.Thread(target=lambda: found.extend(session.ask(coming())))
    thread.start()
    assert stalled.wait(20)
    with lm.session(**TALK) as other:
        for question, task in QUESTIONS:
            assert other.ask(question, task).answer().ended in ("end", "length")
    getattr(session, end)()
    assert not lm.engine.requests.listening()
    on.set()
    thread.join(20)
    assert not thread.is_alive() and [event.reason for event in found] == ["cancelled"]
    if end == "cancel":
        assert not session.turns and session.ask(sound(0.4)).answer().ended in ("end", "length")
    session.close()


def test_a_task_that_is_cancelled_while_sound_comes(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, started, begun, on = [], asyncio.Event(), threading.Event(), threading.Event()
    begin_reading = Session.begin_reading

    async def coming() -> AsyncIterator[Tensor]:
        try:
            started.set()
            yield sound(1.0)
            await asyncio.sleep(30)
        finally:
            closed.append(True)

    def held(session: Session, *args: Any) -> Any:
        listening = begin_reading(session, *args)
        begun.set()
        assert on.wait(20)
        return listening

    async def cancelled(moment: Awaitable[Any]) -> None:
        task = asyncio.create_task(answered(session, coming()))
        await moment
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def run() -> None:
        for moment in (asyncio.sleep(0.0), asyncio.sleep(0.001), asyncio.wait_for(started.wait(), 20)):
            await cancelled(moment)
        monkeypatch.setattr(Session, "begin_reading", held)
        await cancelled(asyncio.to_thread(begun.wait, 20))
        asyncio.get_running_loop().call_later(0.2, on.set)  # the next question comes before its thread goes on
        same(await answered(session, sound(0.4)), wanted)

    with lm.session(**TALK) as session:
        wanted = session.ask(sound(0.4)).answer()
    with lm.session(**TALK) as session:
        asyncio.run(run())
        assert closed and len(session.turns) == 1 and not lm.engine.requests.listening()


@pytest.mark.parametrize("close", ["session", "engine"])
def test_pushing_after_the_end(lm: SpeechLM, close: str) -> None:
    session = lm.session(**TALK)
    listening = session.listen()
    listening.push(sound(1.0))
    session.close() if close == "session" else lm.engine.close()
    with pytest.raises(UserError, match=f"this {close} is closed"):
        listening.push(sound(1.0))
    with pytest.raises(UserError, match=f"this {close} is closed"):
        session.ask(listening)
    with pytest.raises(UserError, match=f"this {close} is closed"):
        session.listen()
    listening.drop()
    session.close()


@pytest.mark.parametrize("chunked", [True, False])
def test_bad_pieces(chunked: bool) -> None:
    lm = listener() if chunked else make_lm(LAYOUTS["pad"])
    with lm.session(**TALK) as session:
        listening = session.listen(sample_rate=16_000)
        for bad, text in (
            ([0.0, float("nan")], "piece 1 of the question holds samples that are not finite"),
            ("text", "piece 2 of the question is a str"),
            ([1e4], "piece 3 of the question has a sample of"),
            (np.broadcast_to(np.float32(0.1), 57_600_000), "by its piece 4, and at most"),
            (torch.zeros(3, 50), "3 channels"),
        ):
            with pytest.raises(UserError, match=text):
                listening.push(bad)
        for good in (torch.zeros(0), [], np.zeros(0, np.int16), [0.1], sound(0.3)):
            listening.push(good)
        for bad, text in (([1], "piece 11 of the question is int64"), (torch.zeros(2, 50), "numbers of two channels, and")):
            with pytest.raises(UserError, match=text):
                listening.push(bad)
        assert listening.seconds == pytest.approx(0.3, abs=1e-3)
        whole = torch.cat([torch.tensor([0.1]), sound(0.3)])
        with lm.session(**TALK) as other:
            same(session.ask(listening).answer(), other.ask(whole).answer())
        empty = session.listen()
        with pytest.raises(UserError, match="without a piece of sound"):
            session.ask(empty)
        empty.push([])
        with pytest.raises(UserError, match="gave 1 pieces without samples"):
            session.ask(empty)
        with pytest.raises(UserError, match="sample rate"):
            session.listen(sample_rate=0)
        assert len(session.turns) == 1


def test_iterators_that_fail_are_listened_to_no_more(lm: SpeechLM) -> None:
    def breaks() -> Iterator[Any]:
        yield sound(0.5)
        raise ZeroDivisionError

    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        for bad, error in ((breaks(), ZeroDivisionError), (iter([sound(0.5), "text"]), UserError), (iter([]), UserError)):
            with pytest.raises(error):
                session.ask(bad)
            assert not lm.engine.requests.listening() and inside(session)._hears is None

        async def run() -> None:
            async def coming() -> AsyncIterator[Any]:
                yield sound(0.5)
                yield "text"

            with pytest.raises(UserError, match="piece 2"):
                await answered(session, coming())

        asyncio.run(run())
        assert not lm.engine.requests.listening() and inside(session)._hears is None
        same(session.ask(sound(0.3)).answer(), other.ask(sound(0.3)).answer())
    with lm.session(**TALK | {"context": 40}) as session:
        with pytest.raises(UserError, match="history and question take"):
            session.ask(iter(sound(2.0).split(1000)))
        assert inside(session)._hears is None and not session.turns
        listening = session.listen()  # one that is held is kept
        listening.push(sound(2.0))
        for _ in range(2):
            with pytest.raises(UserError, match="history and question take"):
                session.ask(listening)
        listening.drop()
        assert session.ask(sound(0.3)).answer().ended in ("end", "length", "cache")


def test_a_single_sample_and_one_sample_at_a_time(lm: SpeechLM) -> None:
    for question in (sound(1 / 16_000), sound(0.2)):
        with lm.session(**TALK) as session, lm.session(**TALK) as other, warnings.catch_warnings():
            warnings.simplefilter("ignore", SoundWarning)
            same(session.ask(iter(question.split(1))).answer(), other.ask(question).answer())


@pytest.mark.parametrize("last", [False, True])
def test_pieces_of_two_channels_of_any_length(lm: SpeechLM, last: bool) -> None:
    question = torch.stack([sound(0.5), sound(0.5, 1)])
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        listening, at = session.listen(), 0
        for size in (5, 0, 1, 2, 3, 1, 2, 10_000):
            piece = question[:, at : at + size]
            listening.push(piece.T if last else piece)
            at += size
        same(session.ask(listening).answer(), other.ask(question).answer())


def test_features_that_are_not_finite_end_one_answer(lm: SpeechLM) -> None:
    weight = lm.model.encoder.whisper.ln_post.weight  # type: ignore[union-attr]
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        same(heard(lm, session, *QUESTIONS[0], wait=True), other.ask(*QUESTIONS[0]).answer())
        with torch.no_grad():
            kept = weight[0].item()
            weight[0] = float("nan")
        listening = session.listen()
        listening.push(sound(1.0))
        wait_until_heard(lm)
        answer = session.ask(listening).answer()
        assert answer.ended == "error" and "not finite" in str(answer.error) and len(session.turns) == 1
        with torch.no_grad():
            weight[0] = kept
        same(heard(lm, session, *QUESTIONS[3], wait=True), other.ask(*QUESTIONS[3]).answer())
        same_cache(lm, session, other)


def test_a_model_without_a_streaming_encoder_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_lm(LAYOUTS["pad"])
    monkeypatch.setattr(Requests, "listen", lambda self, listen: pytest.fail("the engine listens"))
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        for question, task in QUESTIONS:
            same(heard(lm, session, question, task, wait=False), other.ask(question, task).answer())
            same_history(session, other)


def test_slots_are_taken_where_they_are_idle_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = listener()
    lm._engine = Engine(lm.model, slots=2, context=300)
    options = TALK | {"context": 300}
    with lm.session(**options) as one, lm.session(**options) as two, lm.session(**options) as three:
        one.ask(sound(0.3)).answer()
        two.ask(sound(0.3, 1)).answer()
        a, b = one.listen(), two.listen()
        for listening in (a, b):
            listening.push(sound(1.0))
        wait_until_heard(lm)
        held = [inside(session)._seat.slot for session in (one, two, three)]  # type: ignore[union-attr]
        assert sorted(held[:2]) == [0, 1] and held[2] is None  # type: ignore[type-var]
        c = three.listen()
        c.push(sound(1.0, 2))
        assert soon(lambda: inside(three)._hears.known >= 6 * CHUNK)  # encoded, without a slot: the others are listened to
        time.sleep(0.02)
        assert inside(three)._seat is not None and inside(three)._seat.slot is None
        b.drop()
        c.push(sound(0.2, 3))
        assert soon(lambda: inside(three)._seat.slot is not None)
        assert inside(two)._seat is not None and inside(two)._seat.slot is None
        answers = [one.ask(a).answer(), two.ask(sound(0.4)).answer(), three.ask(c).answer()]
    for questions, found in zip(
        ([sound(0.3), sound(1.0)], [sound(0.3, 1), sound(0.4)], [torch.cat([sound(1.0, 2), sound(0.2, 3)])]),
        answers,
        strict=True,
    ):
        with lm.session(**options) as alone:
            for question in questions:
                wanted = alone.ask(question).answer()
            same(found, wanted)
    lm.engine.close()
