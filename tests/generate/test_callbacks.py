"""Answers whose events go to a function: in a thread of their own, whatever the function does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from omni.errors import UserError
from omni.generate import callbacks
from omni.generate.results import Ended, Event
from omni.generate.speech_lm import SpeechLM
from tests.generate.conftest import LAYOUTS, make_lm
from tests.generate.session_toys import CLIPS, TALKATIVE
from tests.generate.test_answer_stream import said

OPTIONS: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 0.6}


@pytest.fixture
def lm() -> SpeechLM:
    return make_lm(LAYOUTS["pad"], context=2000)


def test_a_function_gets_the_events_of_the_iterator_in_one_thread_of_its_own(lm: SpeechLM) -> None:
    events: list[Event] = []
    threads = set()

    def listen(event: Event) -> None:
        events.append(event)
        threads.add(threading.current_thread().name)

    with lm.session(**OPTIONS) as session:
        started = session.start("go on", "T1A2", on_event=listen)
        end = started.wait(30)
        assert isinstance(end, Ended) and started.done and len(session.turns) == 1
    assert said(events) == said(list(lm.stream("go on", "T1A2", **OPTIONS))) and threads == {"omni-listener"}


def test_one_that_raises_ends_its_own_answer_alone(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, calls = said(list(lm.stream("go on", "T1A2", **OPTIONS))), []

    def fails(event: Event) -> None:
        calls.append(event)
        if len(calls) == 3:
            raise ValueError("no loudspeaker")

    lines: list[str] = []
    monkeypatch.setattr(callbacks.LOG, "error", lambda text, *values, **more: lines.append(text % values))
    other: list[Event] = []
    with lm.session(**OPTIONS) as one, lm.session(**OPTIONS) as two:
        first = one.start("go on", "T1A2", on_event=fails)
        second = two.start("go on", "T1A2", on_event=other.append)
        end = first.wait(30)
        assert end is not None and end.reason == "error" and "ValueError: no loudspeaker" in str(end.error)
        assert len(calls) == 3 and not one.turns and second.wait(30) is not None and said(other) == wanted
        assert lines == ["the listener raised ValueError: no loudspeaker; its answer has ended"]
        assert said(list(one.ask("go on", "T1A2"))) == wanted  # as if it had not been asked


def test_one_that_raises_at_the_end_leaves_no_turn(lm: SpeechLM) -> None:
    def fails(event: Event) -> None:
        if isinstance(event, Ended):
            raise ValueError("too late")

    with lm.session(**OPTIONS) as session:
        end = session.start("go on", "T1A2", on_event=fails).wait(30)
        assert end is not None and end.reason == "error" and not session.turns


def test_one_that_does_not_return_holds_nobody_else(lm: SpeechLM) -> None:
    go_on, events = threading.Event(), []

    def hangs(event: Event) -> None:
        events.append(event)
        go_on.wait(60)

    with lm.session(max_seconds=70.0) as stuck, lm.session(**OPTIONS) as session:
        started = stuck.start("go on", "T1A2", on_event=hangs)
        assert session.answer("go on", "T1A2").ended != "error"
        running = stuck._last
        assert running is not None
        for _ in range(2000):
            if running.resting:
                break
            time.sleep(0.005)
        assert running.resting and running.ahead <= 80 and started.wait(0.01) is None
        started.cancel()
        go_on.set()
        end = started.wait(30)
        assert end is not None and end.reason == "cancelled" and events[-1].reason == "cancelled"  # type: ignore[union-attr]


def test_a_cancel_goes_to_its_own_answer_only(lm: SpeechLM) -> None:
    with lm.session(**OPTIONS) as session:
        old = session.start("go on", "T1A2", on_event=lambda event: None)
        old.wait(30)
        events = session.ask("again", "T1A2")
        next(events)
        old.cancel()
        assert list(events)[-1].reason != "cancelled"  # type: ignore[union-attr]


def test_coming_sound_is_read_in_the_answer_s_thread(lm: SpeechLM) -> None:
    go_on = threading.Event()

    def coming() -> Iterator[Tensor]:
        assert threading.current_thread().name == "omni-listener" and go_on.wait(30)
        yield CLIPS[0]

    events: list[Event] = []
    with lm.session(**OPTIONS) as session:
        started = session.start(coming(), on_event=events.append)
        go_on.set()
        started.wait(30)
        assert said(events) == said(list(lm.stream(CLIPS[0], **OPTIONS)))
        with pytest.raises(UserError, match="piece 1"):
            session.start(iter(["x"]), on_event=events.append).wait(30)
        with pytest.raises(UserError, match="on_event"):
            session.start("go on", "T1T2", on_event=None)  # type: ignore[arg-type]


def test_a_coroutine_function_is_no_callback(lm: SpeechLM) -> None:
    async def listen(_: Any) -> None: ...

    with lm.session() as session, pytest.raises(UserError, match=r"on_event is <function .* \(ask_async is for asyncio\)"):
        session.start("go on", "T1A2", on_event=listen)


def test_a_stop_function_that_would_end_the_program_ends_its_answer(lm: SpeechLM) -> None:
    answer = lm.generate("go on", "T1T2", stop=lambda text: sys.exit(3), sampling=TALKATIVE, max_tokens=30)
    assert answer.ended == "error" and "the function `stop` raised SystemExit: 3" in str(answer.error)
