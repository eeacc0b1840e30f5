"""Live listeners: who is stepped when, who is let in, and what becomes of those who do not read."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from omni.engine import intake, sound, stepping
from omni.engine.answer import Seat
from omni.engine.batch import Slots
from omni.engine.intake import Entering, admit
from omni.engine.stats import Recorder
from omni.engine.stepping import Due, choose
from omni.errors import BusyError, UserError
from omni.generate.results import AudioChunk, Ended
from omni.generate.runner import Runner
from omni.generate.sampling import Sampling
from omni.generate.speech_lm import SpeechLM
from tests.generate.conftest import LAYOUTS, make_lm
from tests.generate.session_toys import inside

LONG: dict[str, Any] = {"sampling": Sampling(1.0, top_k=3), "max_seconds": 1.2, "pace": "live"}


def listener(played: float | None, frames: int, pace: str = "live") -> Any:
    """An answer of `frames` frames of 40 ms, of which a listener has played some seconds by the time 100."""
    return SimpleNamespace(
        pace=pace,
        live=pace == "live",
        frame_rate=25.0,
        plays=None if played is None else 100 - played,
        ahead=0,
        processed=0,
        read=0,
        resting=False,
        exact=max(0, frames - 1),
    )


def test_who_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose([listener(0.5, 16), listener(0.5, 17)], 100.0).low  # of 0.16 s, four frames and not two
    monkeypatch.setattr(stepping, "HIGH", 5.0)
    monkeypatch.setattr(stepping, "LEAST", 0.0)
    new, low, fine, full = listener(None, 0), listener(0.4, 12), listener(0.4, 14), listener(0.4, 17)
    program = listener(None, 5, "read")
    found = choose([new, low, fine, full, program], 100.0)
    assert (found.new, found.low, found.along, found.read) == ([new], [low], [fine], [program])
    assert found.slack == pytest.approx(-1 / 25) and not found.late  # the low one holds a frame
    assert found.spare == pytest.approx(1 / 25) and found.full == 1
    assert choose([listener(0.45, 12)], 100.0).late
    about, held = listener(None, 2), listener(None, 21)  # to begin: with one frame; with many, which wait to be enough
    found = choose([fine, about, held], 100.0)
    assert found.new == [about, held] and found.spare == pytest.approx(1 / 25)
    program.ahead = 64
    assert choose([program], 100.0).behind == [program]
    new.processed, fine.processed = 5 + 16 + 250, 5 + 16 + 251
    found = choose([new, fine], 100.0)
    assert (found.new, found.lost, found.along) == ([new], [fine], [])  # ten seconds of 25 frames


def test_rows_that_are_stepped_are_neighbours() -> None:
    slots, seats = Slots(24), [Seat(10) for _ in range(24)]
    for seat in seats:
        slots.hold(seat)
    for seat in seats[2:4]:
        seat.busy = True
    assert slots.closer(4, origin=False) == 4 and slots.closer(4, origin=True) == 0  # the lowest one that is idle
    seats[20].busy = True
    assert slots.closer(20, origin=False) == 0
    assert slots.exchange(20, 0) is seats[0]
    assert (seats[20].slot, seats[0].slot, slots.holders[0], slots.holders[20]) == (0, 20, seats[20], seats[0])
    for seat in seats[:12]:
        seat.busy = True
    slots.give(seats[7])
    assert slots.closer(23, origin=False) == 7  # where nobody is
    assert slots.exchange(23, 7) is None and seats[23].slot == 7 and slots.holders[23] is None


def test_one_more_is_let_in_while_sound_stays_early() -> None:
    recorder = Recorder()
    assert not admit(recorder, 0, 0.04) and not admit(recorder, 50, 0.04)  # nothing is known yet
    for rows in (1, 2, 4, 8) * 4:
        recorder.note(steps=[(rows, 0.004 + 0.001 * rows)])
    assert recorder.cost() == pytest.approx((0.004, 0.001))
    assert not admit(recorder, 31, 0.04)
    assert "a step of 33 rows takes 37 ms, a frame plays 40 ms" in admit(recorder, 32, 0.04)
    for late in [-0.05] * 98 + [-0.0005] * 2:
        recorder.note(late=[late])
    assert admit(recorder, 8, 0.04)  # a millisecond more, and 1 % would be late
    figures = recorder.stats()
    assert figures.underruns == 0 and figures.lateness.p50 == -0.05 and figures.steps == 16 and figures.rows == 3.75


@pytest.fixture
def lm() -> SpeechLM:
    return make_lm(LAYOUTS["pad"], context=400)


def test_a_live_row_rests_when_its_listener_holds_enough(lm: SpeechLM) -> None:
    """Sound is made as it plays, whether anybody reads or not."""
    with lm.session(**LONG) as session:
        events = session.ask("hello", "T1A2")
        next(event for event in events if hasattr(event, "samples"))
        start = time.perf_counter()
        time.sleep(0.4)
        running = inside(session)._last
        assert running is not None
        sounded = len(running.wrote) - lm.layout.max_delay - 1
        played = (time.perf_counter() - start) * 25
        assert played - 2 < sounded < played + 12 or running.over
        list(events)
    figures = lm.engine.stats()
    assert figures.lateness.count and (figures.lateness.p50 or 0) < 0 and figures.first_audio.count == 1 and figures.active == 0
    lm.engine.recorder.clear()
    assert lm.engine.stats().steps == 0


@pytest.mark.long
def test_a_first_sound_waits_for_the_next_frame_where_others_speak(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that somebody's question does not make the second one late; alone it does not wait, nor does a short answer."""
    monkeypatch.setattr(sound, "BEFORE", 1e9)

    def sizes(answers: list[Any]) -> list[list[int]]:
        return [[len(event.samples) for event in events if isinstance(event, AudioChunk)] for events in answers]

    assert lm.codec is not None
    frame = lm.codec.frame_samples
    with ExitStack() as stack:
        sessions = [stack.enter_context(lm.session(**LONG)) for _ in range(6)]
        assert sizes([sessions[0].ask("hello", "T1A2")])[0][0] == frame
        together = sizes([session.ask("hello", "T1A2") for session in sessions])
        assert max(first for first, *_ in together) == 2 * frame
        assert {size for _, *others in together for size in others} == {frame}
        short = [stack.enter_context(lm.session(**{**LONG, "max_seconds": 0.04})) for _ in range(6)]
        assert sizes([session.ask("hello", "T1A2") for session in short]) == [[frame]] * 6


def test_a_step_of_all_waits_where_somebody_is_about_to_run_out(lm: SpeechLM) -> None:
    """Those that cannot wait are stepped alone then."""
    stepping = lm.engine._stepping
    for rows in (1, 2, 4, 8) * 4:
        lm.engine.recorder.note(steps=[(rows, 0.004 + 0.001 * rows)])
    along = [listener(0.4, 14)] * 4
    for spare, beside in ((0.017, []), (0.019, along)):  # a step of five takes 9 ms
        stepping._filling = True
        assert stepping._beside([listener(None, 0)], Due(along=along, spare=spare)) == beside
        lm.engine.recorder.clear()  # nothing is known of a step's cost
        assert stepping._beside([listener(None, 0)], Due(along=along, spare=spare)) == along
        for rows in (1, 2, 4, 8) * 4:  # of a large model: who comes along costs next to nothing, so nobody gains without them
            lm.engine.recorder.note(steps=[(rows, 0.04 + 0.0001 * rows)])
        assert stepping._beside([listener(None, 0)], Due(along=along, spare=spare)) == along
        assert stepping._beside([listener(None, 0)], Due(along=along, spare=0.0, late=True)) == []
        lm.engine.recorder.clear()
        for rows in (1, 2, 4, 8) * 4:
            lm.engine.recorder.note(steps=[(rows, 0.004 + 0.001 * rows)])


@pytest.mark.long
def test_a_listener_for_whom_there_is_no_room_waits_or_is_told(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "admit", lambda recorder, live, frame: "it is too slow" if live else "")
    lm.start_engine(slots=4, queue=1)
    with lm.session(**LONG) as one, lm.session(**LONG) as two, lm.session(**LONG) as three:
        first = one.ask("hello", "T1A2")
        next(first)
        second = two.ask("hello", "T1A2")
        assert two.place == 1 and one.place == 0 and lm.engine.stats().waiting == 1
        with pytest.raises(BusyError, match=r"the queue is full \(1 of 1 wait\): it is too slow; ask again later") as full:
            three.ask("hello", "T1A2")
        assert full.value.waiting == 1 and not three.turns
        with lm.session(when_full="refuse", **LONG) as four, pytest.raises(BusyError, match="no room for another listener"):
            four.ask("hello", "T1A2")
        one.cancel()
        assert isinstance(list(second)[-1], Ended) and two.place == 0
        assert isinstance(list(three.ask("hello", "T1A2"))[-1], Ended)
    with pytest.raises(UserError, match="pace 'fast' is unknown; use 'read', 'live', 'whole'"):
        lm.session(pace="fast")  # type: ignore[arg-type]


@pytest.mark.long
def test_slots_that_are_taken_bound_the_queue_too(lm: SpeechLM) -> None:
    """Also where nothing says that sound would be late, and where all ask at once."""
    lm.start_engine(slots=2, queue=1)
    with ExitStack() as stack:
        lengths = (20.0, 20.0, 1.2, 1.2)
        one, two, three, four = (stack.enter_context(lm.session(**LONG | {"max_seconds": length})) for length in lengths)
        answers = [session.ask("hello", "T1A2") for session in (one, two, three)]
        with pytest.raises(BusyError, match=r"the queue is full \(1 of 1 wait\): the 2 slots are taken; ask again later"):
            four.ask("hello", "T1A2")
        with lm.session(when_full="refuse", **LONG) as five, pytest.raises(BusyError, match="listener: the 2 slots are taken"):
            five.ask("hello", "T1A2")
        one.cancel()
        two.cancel()
        assert isinstance(list(answers[2])[-1], Ended)
        assert isinstance(list(four.ask("hello", "T1A2"))[-1], Ended)


@pytest.mark.parametrize(("pace", "task"), [("live", "T1A2"), pytest.param("read", "T1T2", marks=pytest.mark.long)])
def test_an_answer_that_nobody_reads_ends_and_others_go_on(lm: SpeechLM, pace: str, task: str) -> None:
    lm.start_engine(slots=2, patience=0.05)
    options = LONG | {"pace": pace, "max_tokens": 300}
    with lm.session(**options | {"max_seconds": 10.0}) as asleep, lm.session(**options) as awake:
        unread, read = asleep.ask("hello", task), list(awake.ask("hello", task))
        running = inside(asleep)._last
        assert running is not None and running.left.wait(20) and (pace == "read" or len(running.wrote) < 60)
        ended = list(unread)[-1]
        assert isinstance(ended, Ended) and ended.error is not None and "nobody has read this answer for 0.05 s" in ended.error
        assert not asleep.turns and len(awake.turns) == 1
        assert isinstance(read[-1], Ended) and read[-1].reason in ("end", "length")
        asleep.cancel()
        assert next(asleep.ask("and", task))
    with pytest.raises(UserError, match="patience is 0"):
        SpeechLM(lm.model, lm.tokenizer).start_engine(patience=0)


def test_more_conversations_than_slots_take_turns(lm: SpeechLM) -> None:
    """Who waited longest gives its slot up, and is fed again when it goes on."""
    alone = [lm.generate(text, "T1T2", max_tokens=6).tokens for text in ("one", "two", "three")]
    lm.start_engine(slots=1)
    sessions = [lm.session(max_tokens=6) for _ in range(3)]
    for _ in range(2):
        for session, text in zip(sessions, ("one", "two", "three"), strict=True):
            session.ask(text, "T1T2").answer()
    assert [session.turns[0].text for session in sessions] == alone
    with pytest.raises(UserError, match="3 sessions are open; close them"):
        lm.start_engine(slots=2)
    with pytest.raises(UserError, match="text assist takes 2 slots, and the engine has 1"):
        lm.session(text_assist=True).ask("one", "T1A2")
    with pytest.raises(UserError, match="slots is 0"):
        SpeechLM(lm.model, lm.tokenizer).start_engine(slots=0)


def test_a_step_that_fails_is_told_to_everybody_and_the_next_question_is_answered(
    lm: SpeechLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = lm.generate("hello", "T1T2", max_tokens=6).tokens
    with lm.session(max_tokens=6) as one, lm.session(max_tokens=6) as two:
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "step", lambda *_: (_ for _ in ()).throw(RuntimeError("no such kernel")))
            for session in (one, two):
                with pytest.raises(RuntimeError, match="no such kernel"):
                    session.ask("hello", "T1T2").answer()
        assert one.ask("hello", "T1T2").answer().tokens == two.ask("hello", "T1T2").answer().tokens == alone


def test_questions_on_their_way_in_are_waited_for_and_told_of_failures(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = Entering.piece

    def slowly(entering: Entering, columns: int) -> bool:
        time.sleep(0.1)
        return piece(entering, columns)

    with lm.session(max_tokens=6) as session:
        with monkeypatch.context() as patch:
            patch.setattr(intake, "Entering", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
            with pytest.raises(RuntimeError, match="no memory"):
                session.ask("hello", "T1T2").answer()
        monkeypatch.setattr(Entering, "piece", slowly)
        events = session.ask("hello", "T1T2")
        while lm.engine._intake.entering is None:
            time.sleep(0.001)
        assert lm.engine.drain(20) and inside(session)._last is not None and inside(session)._last.left.wait(5)
        assert next(event for event in events if isinstance(event, Ended)).reason in ("end", "length")


def test_a_question_that_comes_while_the_engine_closes_is_refused(lm: SpeechLM) -> None:
    said: list[BaseException] = []
    session = lm.session()

    def ask() -> None:
        try:
            session.ask("hello", "T1T2")
        except UserError as error:
            said.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    with lm.engine.requests.lock:
        asking.start()
        time.sleep(0.1)  # it waits for the lock
        lm.engine.close()
    asking.join(20)
    assert "this engine is closed" in str(said[0]) and not session.turns
