"""Sessions: what is delivered, what is remembered, and what a cut leaves of an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.engine import conversation as session_module
from omni.generate.results import AudioChunk, Ended, Event, TextDelta
from omni.generate.runner import Prefill, Runner
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.layout import IGNORE, Layout
from omni.tasks import example, prompt
from tests.generate.conftest import make_lm
from tests.generate.session_toys import ASKED, TALKATIVE, WARM, inside, plain_hidden


def ask(lm: SpeechLM, session: Session, begun: list[tuple[Tensor, int]], turn: int) -> Iterator[Event]:
    """Ask, and check that the answer starts from the state of a plain forward over what the history says."""
    history = session.turns
    events = session.ask(*ASKED[turn % 5])
    first = next(events)
    assert inside(session)._last is not None
    expected = plain_hidden(lm, history, inside(session)._last.exchange.turn)
    torch.testing.assert_close(begun[-1][0], expected, rtol=1e-4, atol=1e-5)
    return chain([first], events)


def reason(events: Iterator[Event]) -> str:
    last = list(events)[-1]
    assert isinstance(last, Ended)
    return last.reason


@pytest.mark.sampled(1)
@pytest.mark.parametrize("assist", [False, True])
def test_undisturbed_turns_are_remembered_as_training_has_them(
    chatty: SpeechLM, begun: list[tuple[Tensor, int]], assist: bool
) -> None:
    with chatty.session(sampling=WARM, seed=4, max_seconds=1.2, max_tokens=30, text_assist=assist) as session:
        before, ended = 0, ""
        for turn in range(5):
            events = ask(chatty, session, begun, turn)
            if ended == "end" and chatty.layout.fill == "pad":
                # A stream that ends late cuts frames that the streams before it have begun: those columns are fed again.
                assert before - 1 - chatty.layout.max_delay <= begun[-1][1] <= before - 1
                if ASKED[turn - 1][1] == "A1T2":
                    assert begun[-1][1] == before - 1  # only the answer's last column is fed with the question
            ended = reason(events)
            before = example(chatty.layout, session.turns).tokens.shape[1]
        assert len(session.turns) == 5


def first_frames(events: Iterator[Event], chunks: int) -> list[Event]:
    """Take events until so many pieces of sound have come."""
    taken: list[Event] = []
    while sum(isinstance(e, AudioChunk) for e in taken) < chunks:
        taken.append(next(events))
    return taken


def cancel_between_events(session: Session, events: Iterator[Event]) -> None:
    taken = first_frames(events, 3)
    session.cancel()
    assert reason(events) == "cancelled"
    check_delivered(session, taken)


def close_the_iterator(session: Session, events: Iterator[Event]) -> None:
    taken = first_frames(events, 2)
    events.close() if hasattr(events, "close") else session.cancel()  # type: ignore[attr-defined]
    session.cancel()
    session.commit()
    check_delivered(session, taken)


def leave_it_unread(session: Session, events: Iterator[Event]) -> None:
    check_delivered(session, first_frames(events, 4), later=True)


def hear_two_frames_and_read_three_letters(session: Session, events: Iterator[Event]) -> None:
    taken = first_frames(events, 5)
    session.cancel(played_seconds=0.11, shown_characters=3)
    assert reason(events) == "cancelled"
    codes, text = session.turns[-1].codes, "".join(e.text for e in taken if isinstance(e, TextDelta))
    assert codes is not None and codes.shape[1] == 2  # 0.11 s are two whole frames of 0.04 s
    assert session.tokenizer.decode(session.turns[-1].text or ()) == text[:3]


def interrupt_what_still_plays(session: Session, events: Iterator[Event]) -> None:
    ended = reason(events)
    whole = session.turns[-1].codes
    session.cancel(played_seconds=0.2)
    session.cancel(played_seconds=0.12)
    session.cancel(played_seconds=0.3)
    cut = session.turns[-1].codes
    assert ended != "cancelled" and whole is not None and cut is not None and torch.equal(cut, whole[:, :3])


def hear_half_of_what_was_handed_over(session: Session, events: Iterator[Event]) -> None:
    taken = first_frames(events, 8)
    handed = [e for e in taken if isinstance(e, AudioChunk)][-1].end
    session.cancel(played_seconds=handed / 2)
    assert reason(events) == "cancelled"
    turn = session.turns[-1]
    text, whole = session.tokenizer.decode(turn.text or ()), "".join(e.text for e in taken if isinstance(e, TextDelta))
    assert turn.codes is not None and turn.codes.shape[1] == int(handed / 2 * 25 + 1e-6)
    assert whole.startswith(text) and len(text) < len(whole)


def hear_some_of_what_still_plays(session: Session, events: Iterator[Event]) -> None:
    reason(events)
    whole = session.turns[-1].text or ()
    lengths = []
    for played in (9.0, 0.3, 0.1, 0.0):
        session.cancel(played_seconds=played)
        lengths.append(len(session.turns[-1].text or ()))
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] == 0 < lengths[0] <= len(whole)


def cancel_at_once(session: Session, events: Iterator[Event]) -> None:
    events = session.ask("never mind", "T1A2")
    session.cancel()
    assert reason(events) == "cancelled"
    assert session.turns[-1].text == () and session.turns[-1].codes.shape[1] == 0  # type: ignore[union-attr]


def check_delivered(session: Session, taken: list[Event], later: bool = False) -> None:
    """The last turn of the history is what the events gave: whole frames of the sound, and the text."""
    if later:
        session.commit()
    turn = session.turns[-1]
    samples = torch.cat([e.samples for e in taken if isinstance(e, AudioChunk)])
    frames = len(samples) // 4
    assert turn.codes is not None and turn.codes.shape[1] == frames > 0
    whole = inside(session).codec.decode(torch.cat([turn.codes, turn.codes[:, :1]], dim=1))  # type: ignore[union-attr]
    assert torch.equal(whole[: 4 * (frames - 1)], samples[: 4 * (frames - 1)])
    assert session.tokenizer.decode(turn.text or ()) == "".join(e.text for e in taken if isinstance(e, TextDelta))


CUTS: list[Callable[[Session, Iterator[Event]], None]] = [
    *(cancel_between_events, close_the_iterator, leave_it_unread, hear_two_frames_and_read_three_letters),
    *(interrupt_what_still_plays, hear_half_of_what_was_handed_over, hear_some_of_what_still_plays, cancel_at_once),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", CUTS, ids=lambda f: f.__name__)
def test_only_what_was_delivered_is_remembered(
    chatty: SpeechLM, begun: list[tuple[Tensor, int]], cut: Callable[[Session, Iterator[Event]], None]
) -> None:
    """After a cut, the next question starts from the plain forward over the offline layout of the delivered part."""
    with chatty.session(sampling=TALKATIVE, seed=11, max_seconds=1.0, max_tokens=12) as session:
        list(ask(chatty, session, begun, 0))
        cut(session, ask(chatty, session, begun, 1))
        list(ask(chatty, session, begun, 2))
        list(ask(chatty, session, begun, 4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("played", [0.0, 0.13, 0.3])
def test_after_a_cut_the_answer_is_that_of_a_conversation_in_which_only_this_was_said(chatty: SpeechLM, played: float) -> None:
    kwargs: dict[str, Any] = {"sampling": TALKATIVE, "seed": 11, "max_seconds": 1.0, "max_tokens": 24}
    with chatty.session(**kwargs) as session:
        first_frames(session.ask(*ASKED[0]), 9)
        session.cancel(played_seconds=played)
        second = session.ask(*ASKED[1])
        cut = inside(session)._past[0]
        list(second)
        interrupted = session.turns[-1]
    with chatty.session(**kwargs) as fresh:
        inside(fresh)._past, inside(fresh)._asked = [cut], 1
        fresh.ask(*ASKED[1]).answer()
        assert fresh.turns[-1].text == interrupted.text
        assert torch.equal(fresh.turns[-1].codes, interrupted.codes)  # type: ignore[arg-type]


@pytest.mark.sampled(1)
def test_events_say_when_they_are_spoken(chatty: SpeechLM) -> None:
    with chatty.session(sampling=TALKATIVE, seed=11, max_seconds=1.0, max_tokens=24) as session:
        events = list(session.ask(*ASKED[0]))
        sound, text = ([e for e in events if isinstance(e, kind)] for kind in (AudioChunk, TextDelta))
        for pieces in (sound, text):
            assert pieces and pieces[0].start == 0
            assert all(one.end == two.start for one, two in pairwise(pieces))
        assert sound[-1].end == sum(len(e.samples) for e in sound) / 100  # exact: samples handed over
        assert text[-1].end == pytest.approx(sum(chatty.speech_time.durations("".join(e.text for e in text))))
        written = [e for e in session.ask(*ASKED[2]) if isinstance(e, TextDelta)]
        assert written and all(e.start is None and e.end is None for e in written)  # nobody speaks it


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", CUTS, ids=lambda f: f.__name__)
def test_training_writes_a_cut_answer_as_a_session_feeds_it(
    chatty: SpeechLM, begun: list[tuple[Tensor, int]], cut: Callable[[Session, Iterator[Event]], None]
) -> None:
    layout = chatty.layout
    with chatty.session(sampling=TALKATIVE, seed=11, max_seconds=1.0, max_tokens=12) as session:
        cut(session, ask(chatty, session, begun, 1))
        events = ask(chatty, session, begun, 2)
        assert inside(session)._last is not None
        known = inside(session)._seat.held.keys[: len(inside(session)._last.keys)]
        fed = torch.tensor([key[: len(layout)] for key in known]).T
        asked = replace(inside(session)._last.exchange.turn, text=(1,))
        whole = example(layout, [*(replace(turn, cut=True) for turn in session.turns), asked])
        assert torch.equal(whole.tokens[:, : fed.shape[1]], fed)
        before = fed.shape[1] - len(prompt(layout, asked))
        ends = (whole.targets[:, : before - 1] == layout.ids("end")[:, None]).any(1)
        assert not ends.any() and (whole.targets[-1, fed.shape[1] - 1 :] != IGNORE).any()
        list(events)


@pytest.mark.sampled(1)
def test_past_overwritten_slots_the_conversation_is_fed_again(
    layout: Layout, begun: list[tuple[Tensor, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sliding ring with hardly more slots than its window cannot go far back, nor behind a prefill that failed."""
    lm = make_lm(layout, window=6)
    init, piece = Runner.__init__, Prefill.piece
    monkeypatch.setattr(Runner, "__init__", lambda self, *a, **k: init(self, *a, **{**k, "chunk": 4}))

    def failing(*args: Any) -> Any:
        piece(*args)
        raise RuntimeError("no memory")

    with lm.session(sampling=TALKATIVE, seed=11, max_seconds=1.0, max_tokens=12) as session:
        list(ask(lm, session, begun, 0))
        events = ask(lm, session, begun, 1)
        first_frames(events, 6)
        session.cancel(played_seconds=0.04)
        list(ask(lm, session, begun, 2))
        assert lm.engine.runner is not None and lm.engine.runner.cache.ring
        assert begun[-1][1] == 0
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
            patch.setattr(Prefill, "piece", failing)
            list(session.ask(*ASKED[1]))
        list(ask(lm, session, begun, 2))
        assert begun[-1][1] == 0


def held(session: Session, turn: int, count: int = 3) -> Iterator[Event]:
    """An iterator of an answer that someone stopped reading after some events."""
    events = session.ask(*ASKED[turn])
    for _ in range(count):
        next(events)
    return events


@pytest.mark.sampled(1)
@pytest.mark.parametrize("assist", [False, True])
@pytest.mark.parametrize("count", [0, 5])
def test_an_old_iterator_takes_nothing_of_a_newer_answer(chatty: SpeechLM, assist: bool, count: int) -> None:
    kwargs: dict[str, Any] = {"sampling": TALKATIVE, "seed": 11, "max_seconds": 1.0, "text_assist": assist}
    got = []
    for disturbed in (False, True):
        with chatty.session(**kwargs) as session:
            old, new = held(session, 1, count), session.ask(*ASKED[4])
            first = [next(new), next(new)]
            if disturbed:
                assert reason(old) == "cancelled"
            events = [event for event in chain(first, new) if not isinstance(event, Ended)]
            said = [e.text if isinstance(e, TextDelta) else e.samples.tolist() for e in events]
            got.append((said, len(session.turns)))
    assert got[0] == got[1] and got[0][1] == 2


@pytest.mark.sampled(1)
def test_a_cancel_while_the_next_question_is_laid_out_is_not_lost(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener interrupts the last answer just when the next is asked: either the new layout has the cut, or the
    cancel goes to the new answer; the history and what the cache is told must never differ."""
    lm = make_lm(layout)
    fit = session_module.fit
    with lm.session(sampling=TALKATIVE, seed=11, max_seconds=1.0) as session:
        list(session.ask(*ASKED[1]))

        def slowly(*args: Any) -> Any:
            thread = threading.Thread(target=session.cancel, kwargs={"played_seconds": 0.04})
            thread.start()
            thread.join(0.2)
            threads.append(thread)
            return fit(*args)

        threads: list[threading.Thread] = []
        monkeypatch.setattr(session_module, "fit", slowly)
        before = list(inside(session)._past)
        events = session.ask(*ASKED[4])
        for thread in threads:
            thread.join(30)
        assert all(a is b for a, b in zip(before, inside(session)._past[:-1], strict=True))
        assert reason(events) == "cancelled"
