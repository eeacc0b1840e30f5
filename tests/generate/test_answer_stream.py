"""Streams of answers, plain and in loops of asyncio, and the ends of sessions: what is cancelled, what stays, who waits."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.checkpoint.folder import save_folder
from omni.engine.listener import Listener
from omni.errors import UserError
from omni.generate.answer_stream import AnswerStream
from omni.generate.results import AudioChunk, Ended, Event, TextDelta
from omni.generate.runner import Runner
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.text import Tokenizer
from tests.generate.conftest import LAYOUTS, make_lm, make_model
from tests.generate.session_toys import ASKED, CLIPS, TALKATIVE, answered, inside, is_free


@pytest.fixture
def lm() -> SpeechLM:
    return make_lm(LAYOUTS["pad"], context=2000)


def said(events: list[Any]) -> tuple[str, list[float], str]:
    sound = [s for e in events if isinstance(e, AudioChunk) for s in e.samples.tolist()]
    return "".join(e.text for e in events if isinstance(e, TextDelta)), sound, events[-1].reason


@pytest.mark.long
def test_sessions_of_one_loop_are_answered_as_those_of_threads(lm: SpeechLM) -> None:
    options: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 0.6}

    async def one(seed: int) -> list[Any]:
        async with lm.session(seed=seed, **options) as session:
            first = [e async for e in session.ask(*ASKED[seed % 5])]
            answer = await answered(session, *ASKED[1])
            return [said(first), answer.text, answer.codes.tolist(), len(session.turns)]  # type: ignore[union-attr]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(one(seed) for seed in range(6)))

    together = asyncio.run(all_of_them())
    for seed, found in enumerate(together):
        with lm.session(seed=seed, **options) as session:
            first = list(session.ask(*ASKED[seed % 5]))
            answer = session.ask(*ASKED[1]).answer()
            assert found == [said(first), answer.text, answer.codes.tolist(), 2]  # type: ignore[union-attr]


def heard(session: Session) -> list[Any]:
    return [(turn.text, None if turn.codes is None else turn.codes.tolist()) for turn in session.turns]


def by_cancelling_the_task(session: Session) -> list[Any]:
    async def run() -> None:
        taken = asyncio.Event()

        async def listen() -> None:
            count = 0
            async for _ in session.ask("go on", "T1A2"):
                count += 1
                if count == 4:
                    taken.set()
                    await asyncio.sleep(30)

        task = asyncio.create_task(listen())
        await taken.wait()
        task.cancel()
        start = time.perf_counter()
        again = [event async for event in session.ask("and then", "T1T2")]  # at once, as one who interrupts
        assert time.perf_counter() - start < 20 and isinstance(again[-1], Ended)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    return heard(session)


def by_leaving_the_loop(session: Session) -> list[Any]:
    async def run() -> None:
        count = 0
        async for _ in session.ask("go on", "T1A2"):
            count += 1
            if count == 4:
                break
        gc.collect()
        assert len(session.turns) == 1  # at once
        await answered(session, "and then", "T1T2")

    asyncio.run(run())
    return heard(session)


def by_closing_the_loop(session: Session) -> list[Any]:
    loop = asyncio.new_event_loop()
    events = session.ask("go on", "T1A2")
    for _ in range(4):
        loop.run_until_complete(events.__anext__())
    loop.close()
    session.ask("and then", "T1T2").answer()
    return heard(session)


LEFT: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 70.0, "max_tokens": 20}


def left_by_a_loop(lm: SpeechLM) -> list[Any]:
    """What is heard by a plain loop that takes four events, and asks again."""
    with lm.session(**LEFT) as session:
        events = session.ask("go on", "T1A2")
        for _ in range(4):
            next(events)
        session.ask("and then", "T1T2").answer()
        return heard(session)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("leave", [by_cancelling_the_task, by_leaving_the_loop, by_closing_the_loop])
def test_what_was_taken_is_remembered_when_the_next_is_asked(lm: SpeechLM, leave: Any) -> None:
    with lm.session(**LEFT) as session:
        assert leave(session) == left_by_a_loop(lm)
    assert is_free(lm)
    del session
    gc.collect()
    assert not lm._link.conversations


async def test_a_cancel_does_not_wait_for_the_step(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, go_on, inside = Runner.step, threading.Event(), threading.Event()

    def waiting(runner: Runner, *rows: Any) -> None:
        if runner.rows[0] is not None and runner.rows[0].position > 20:
            inside.set()
            assert go_on.wait(30)
        step(runner, *rows)

    monkeypatch.setattr(Runner, "step", waiting)
    async with lm.session(max_seconds=70.0, max_tokens=5) as session:
        events = session.ask("go on", "T1A2")
        await events.__anext__()
        await asyncio.to_thread(inside.wait, 30)
        await events.aclose()  # would wait for ever
        assert len(session.turns) == 1 and not go_on.is_set()
        go_on.set()
        await answered(session, "and then", "T1T2")


async def test_errors_come_out_of_the_iterator(lm: SpeechLM) -> None:
    async with lm.session() as session:
        with pytest.raises(UserError, match="No such file"):
            async for _ in session.ask("missing.wav"):
                pass
        assert len(session.turns) == 0
        assert (await answered(session, "go on", "T1T2")).ended in ("end", "length")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Steps wait until it is set."""
    step, go_on = Runner.step, threading.Event()
    monkeypatch.setattr(Runner, "step", lambda runner, *rows: (go_on.wait(10), step(runner, *rows))[1])
    return go_on


async def test_of_two_tasks_of_one_session_one_may_ask_and_the_other_close(lm: SpeechLM, held: threading.Event) -> None:
    async with lm.session(max_tokens=5) as session:
        events = session.ask("one", "T1T2")
        first = asyncio.create_task(taken(events))
        while session._last is None or session._last.reader != -1:
            await asyncio.sleep(0.001)
        with pytest.raises(UserError, match="thread or task"):
            await answered(session, "one", "T1T2")
        await events.aclose()
        assert (await asyncio.wait_for(first, 5))[-1].reason == "cancelled" and not held.is_set()
        held.set()


def test_a_close_ends_the_wait_of_another_thread(lm: SpeechLM, held: threading.Event) -> None:
    with lm.session(max_tokens=5) as session, ThreadPoolExecutor(1) as pool:
        events = session.ask("one", "T1T2")
        listening = pool.submit(list, events)
        while session._last is None or not session._last.reader:
            time.sleep(0.001)
        events.close()
        assert len(session.turns) == 1 and not held.is_set()
        held.set()
        assert listening.result(10)[-1].reason == "cancelled" and not list(events)  # type: ignore[attr-defined]


async def taken(stream: AnswerStream) -> list[Any]:
    return [event async for event in stream]


def test_a_stream_is_plain_or_asynchronous_wherever_it_was_made(lm: SpeechLM) -> None:
    options: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 0.4}
    wanted = said(list(lm.stream("go on", "T1A2", **options)))

    async def plain() -> list[Any]:
        return list(lm.session(**options).ask("go on", "T1A2"))

    async def inside() -> list[Any]:
        return await taken(lm.session(**options).ask("go on", "T1A2"))

    before = lm.session(**options).ask("go on", "T1A2")
    assert said(asyncio.run(taken(before))) == said(asyncio.run(plain())) == said(asyncio.run(inside())) == wanted


def test_one_that_is_not_read_holds_nobody_else(lm: SpeechLM) -> None:
    with lm.session(max_seconds=70.0) as stuck, lm.session(max_seconds=0.6) as session:
        events = stuck.ask("go on", "T1A2")
        assert session.ask("go on", "T1A2").answer().ended != "error"
        running = inside(stuck)._last
        for _ in range(2000):
            if running is not None and running.resting:
                break
            time.sleep(0.005)
        assert running is not None and running.resting and running.ahead <= 80
        stuck.cancel()
        assert [event.reason for event in events] == ["cancelled"]  # type: ignore[union-attr]


def pieces(clip: Tensor, size: int = 777) -> Iterator[Tensor]:
    yield from clip.split(size)


@pytest.mark.parametrize("close", [False, True])
def test_a_cancel_while_sound_is_coming_closes_its_generator(lm: SpeechLM, close: bool) -> None:
    session, closed = lm.session(), []

    def coming() -> Iterator[Tensor]:
        try:
            yield CLIPS[0]
            with pytest.raises(UserError, match="another answer"):
                session.ask("meanwhile", "T1T2")
            session.close() if close else session.cancel()
            yield CLIPS[0]
            raise AssertionError
        finally:
            closed.append(True)

    events = list(session.ask(coming()))
    assert [e.reason for e in events] == ["cancelled"] and closed and not session.turns  # type: ignore[union-attr]
    session.close()


def ended(events: list[Event]) -> str:
    assert isinstance(events[-1], Ended)
    return events[-1].reason


def test_close_from_another_thread_waits_for_the_step_and_frees_the_cache(
    lm: SpeechLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, step = lm.session(max_seconds=70.0), Runner.step
    inside, go_on = threading.Event(), threading.Event()
    events: list[Event] = []

    def waiting(runner: Runner, *rows: Any) -> None:
        if len(events) >= 3:
            inside.set()
            assert go_on.wait(30)
            assert runner.rows[0] is not None  # nobody has freed it meanwhile
        step(runner, *rows)

    monkeypatch.setattr(Runner, "step", waiting)
    consumer = threading.Thread(target=lambda: [events.append(event) for event in session.ask("go on", "T1A2")])
    consumer.start()
    assert inside.wait(30)
    closer = threading.Thread(target=session.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    go_on.set()
    closer.join(30)
    consumer.join(30)
    assert not closer.is_alive() and not consumer.is_alive()
    assert ended(events) == "cancelled" and is_free(lm) and len(session.turns) == 1
    with pytest.raises(UserError, match="closed"):
        session.ask("again", "T1A2")


@pytest.mark.parametrize("after", [0.0, 0.004, 0.02])
def test_a_signal_s_handler_may_close_the_session_that_it_interrupts(lm: SpeechLM, after: float) -> None:
    session = lm.session(max_seconds=70.0)
    before = signal.signal(signal.SIGALRM, lambda *_: session.close())
    try:
        events = session.ask("go on", "T1A2")
        signal.setitimer(signal.ITIMER_REAL, after + 1e-4)
        assert ended(list(events)) == "cancelled" and is_free(lm)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_closes_just_before_its_thread_waits_is_not_missed(
    lm: SpeechLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = lm.session(max_seconds=70.0)
    events = session.ask("go on", "T1A2")
    wait, left = events.running.changed.wait, [session.close]

    def interrupted(timeout: float | None = None) -> bool:
        if left:
            left.pop()()
        assert timeout is not None  # else this would wait for good
        return wait(timeout)

    monkeypatch.setattr(events.running.changed, "wait", interrupted)
    assert ended(list(events)) == "cancelled" and is_free(lm) and not left


def test_an_answer_that_is_cancelled_between_events_is_in_the_history_at_once(lm: SpeechLM, tmp_path: Path) -> None:
    with lm.session(max_seconds=70.0) as session:
        events = session.ask("go on", "T1A2")
        for _ in range(5):
            next(events)
        session.cancel(played_seconds=0.04)
        turn = session.turns[-1]
        assert turn.codes is not None and turn.codes.shape[1] == 1 and len(session.history) == 2
        with lm.session(history=session.save(tmp_path / "talk")) as other:
            assert len(other.turns) == 1
        assert ended(list(events)) == "cancelled" and len(session.turns) == 1


BAD: list[dict[str, Any]] = [
    {"played_seconds": float("nan")}, {"played_seconds": -0.1}, {"played_seconds": float("inf")}, 
    {"shown_characters": -1}, 
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_cancel_is_refused_and_the_answer_goes_on(lm: SpeechLM, bad: dict[str, Any]) -> None:
    with lm.session(max_seconds=0.4, max_tokens=30) as session:
        whole = session.ask("go on", "T1A2", seed=1).answer()
        kept = inside(session)._past[-1]
        with pytest.raises(UserError, match=[*bad][-1]):
            session.cancel(**bad)
        assert inside(session)._past[-1] is kept
        events = session.ask("go on", "T1A2", seed=1)
        taken = [next(events)]
        with pytest.raises(UserError, match=[*bad][-1]):
            session.cancel(**bad)
        taken += events
        assert ended(taken) == whole.ended != "cancelled" and len(session.turns) == 2
        codes = session.turns[-1].codes
        session.cancel(played_seconds=1e8, shown_characters=2**62)  # more than was played is all of it
        assert codes is not None and torch.equal(session.turns[-1].codes, codes)  # type: ignore[arg-type]


@pytest.mark.long
def test_iterators_that_are_still_held_at_the_interpreter_s_exit_are_silent(tmp_path: Path) -> None:
    model = make_model(Layout.preset("codec2"))
    save_folder(tmp_path / "model", model.config, model.state_dict(), Tokenizer.bytes())
    code = (
        "from omni import SpeechLM\n"
        f"lm = SpeechLM.from_pretrained({str(tmp_path / 'model')!r})\n"
        "events = lm.stream('hello', 'T1A2')\n"
        "next(events); next(events)\n"
        "session = lm.session()\n"
        "more = session.ask('hello', 'T1A2')\n"
        "next(more)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("options, once", [({}, True), ({"stop": lambda text: False}, False)])
def test_who_reads_an_answer_whole_is_woken_by_its_end_alone(lm: SpeechLM, monkeypatch: Any, options: Any, once: bool) -> None:
    woken, notify = [], Listener.notify
    monkeypatch.setattr(Listener, "notify", lambda self: (woken.append(self.ended), notify(self)))
    with lm.session(pace="whole", max_tokens=20, **options) as session:
        answer = session.ask("hello", "T1T2").answer()
    assert answer.text == lm.generate("hello", "T1T2", max_tokens=20).text
    assert woken and all(woken) == once
