"""Conversations without end: what stays is fed before the next question, and nothing but the time tells."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.engine import prefill_ahead
from omni.engine.answer import Seat
from omni.engine.engine import Engine
from omni.engine.prefill_ahead import HOLD, LEAST, columns_in, plan
from omni.engine.stepping import SteppingThread
from omni.errors import UserError
from omni.generate.history import Exchange, fit, forgotten, lay_out
from omni.generate.runner import Runner, pack, prefill
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.tasks import Turn, answer, prompt, system_message
from tests.generate.conftest import LAYOUTS, make_lm
from tests.generate.session_toys import ASKED, WARM, inside, plain_hidden
from tests.soon import soon

ROW = 120
TALK: dict[str, Any] = {"context": ROW, "overflow": "forget", "sampling": WARM, "max_seconds": 0.4, "max_tokens": 15}


def wait_until_fed(lm: SpeechLM) -> None:
    """Wait until the engine has nothing more to feed ahead."""
    assert soon(lambda: not lm.engine.requests.refills), "what stays was not fed"


def talk(lm: SpeechLM, turns: int, wait: bool = True, **options: Any) -> list[tuple[int, ...]]:
    """Hold a conversation; returns the answers' tokens."""
    with lm.session(**TALK | options) as session:
        said = []
        for turn in range(turns):
            said.append(session.ask(*ASKED[turn % 5]).answer().tokens)
            if wait:
                wait_until_fed(lm)
        return said


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has the engine never feed ahead, once called."""
    return lambda: monkeypatch.setattr(SteppingThread, "_feed_what_stays", lambda self, slack: False)


def slow(sizes: list[int], prompts: list[int], system: int, length: int) -> int:
    """`forgotten` by trying every number of turns."""
    if system + sum(sizes) + max(prompts, default=0) <= length - length // 4:
        return 0
    ways = range(max(len(sizes), 1))
    return next((n for n in ways if system + sum(sizes[n:]) <= length // 4), ways[-1])


def test_turns_go_when_a_question_would_leave_less_than_a_quarter_until_three_quarters_are_free() -> None:
    plain, rng, seen = LAYOUTS["pad"], random.Random(0), set()
    for _ in range(100):
        past = []
        for number in range(rng.randint(0, 6)):
            text = tuple(rng.randrange(200) for _ in range(rng.randint(1, 30)))
            past.append(Exchange(Turn("T1T2", question=text[:9], text=text), number))
        system, length = (1, 2, 3)[: rng.choice([0, 3])], rng.randint(40, 200)
        prompts = [len(prompt(plain, e.turn)) for e in past]
        sizes = [p + len(answer(plain, e.turn)) for p, e in zip(prompts, past, strict=True)]
        gone = forgotten(plain, past, system, length)
        assert gone == slow(sizes, prompts, len(system_message(plain, system)), length)
        seen.add((gone > 0, gone == len(past) - 1))
        asked = Exchange(Turn("T1T2", question=(1, 2)), 9)
        kept, _, keys = fit(plain, past, asked, system, length, 512, True)
        assert len(kept) <= len(past) - gone and (not kept or len(keys) <= length - length // 4)
        assert (
            len(kept) == len(past) - gone
            or len(lay_out(plain, past[-len(kept) - 1 :], asked, system)[1]) > length - length // 4
        )
    assert len(seen) == 4


def test_a_plan_holds_what_the_next_question_finds() -> None:
    plain = LAYOUTS["pad"]
    past = [Exchange(Turn("T1T2", question=(n,) * 5, text=(n,) * 9), n) for n in range(9)]
    refill = plan(plain, Seat(200), past, (7, 7), None)
    _, _, keys = fit(plain, past, Exchange(Turn("T1T2", question=(1, 2)), 9), (7, 7), 200, 512, True)
    assert refill is not None and refill.keys == keys[:-5]
    assert plan(plain, Seat(400), past, (7, 7), None) is None
    unheard = replace(past[-1], clip=torch.zeros(9))
    assert plan(plain, Seat(200), [*past[:-1], unheard], (7, 7), None) is None


def reference(lm: SpeechLM, session: Session) -> list[Tensor]:
    """Keys and values of the row that a fresh prefill makes of what stays, per layer [H, C, D]."""
    held = inside(session)._past[forgotten(lm.layout, inside(session)._past, inside(session)._system, ROW) :]
    columns, _ = lay_out(lm.layout, held, None, inside(session)._system)
    cache = lm.model.make_cache(1, ROW, chunk=ROW)
    with torch.inference_mode():
        prefill(lm.model, cache, [0], pack(lm.layout, [columns], [e.features for e in held if e.features is not None]))
    return [memory[0, : len(columns)] for memory in (*cache.keys, *cache.values)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("system", ["", "be brief"])
def test_the_row_is_that_of_a_fresh_prefill(layout: Layout, system: str) -> None:
    lm, checked = make_lm(layout), 0
    with lm.session(**TALK | {"system": system}) as session:
        for turn in range(9):
            session.ask(*ASKED[turn % 5]).answer()
            wait_until_fed(lm)
            seat, runner = inside(session)._seat, lm.engine.runner
            assert seat is not None and runner is not None and seat.slot is not None
            if not forgotten(layout, inside(session)._past, inside(session)._system, ROW):
                continue
            expected = reference(lm, session)
            for mine, own in zip((*runner.cache.keys, *runner.cache.values), expected, strict=True):
                torch.testing.assert_close(mine[seat.slot, : len(own)], own, rtol=1e-4, atol=1e-5)
            assert (runner.cache.positions[seat.slot] >= 0).sum() == len(expected[0]) == len(seat.held.keys)
            checked += 1
    assert checked >= 2


@pytest.mark.long
def test_sixty_turns_feed_only_their_questions(begun: list[tuple[Tensor, int]]) -> None:
    lm = make_lm(LAYOUTS["pad"])
    with lm.session(**TALK | {"context": 200}) as session:
        fresh, lengths = [], []
        for turn in range(60):
            reply = session.ask(*ASKED[turn % 5]).answer()
            assert reply.ended in ("end", "length")
            assert inside(session)._last is not None
            fresh.append(
                len(inside(session)._last.keys) - begun[-1][1] - len(prompt(lm.layout, inside(session)._last.exchange.turn))
            )
            lengths.append(len(session.turns))
            wait_until_fed(lm)
    # the last column of an answer, or all columns of one that was cut: never what was fed before
    assert max(fresh) <= 10 + lm.layout.max_delay + 2 and sum(b <= a for a, b in pairwise(lengths)) >= 5


@pytest.mark.long
def test_answers_are_those_without_it(chatty: SpeechLM, idle: Callable[[], None]) -> None:
    some = talk(chatty, 10, wait=False)
    every = talk(chatty, 10)
    idle()
    assert every == some == talk(chatty, 10, wait=False)


@pytest.mark.sampled(1)
def test_a_ring_of_a_window_too(layout: Layout, idle: Callable[[], None]) -> None:
    lm = make_lm(layout, window=9)

    def held(wait: bool) -> list[tuple[int, ...]]:
        lm._engine = Engine(lm.model, slots=1)
        lm._engine._batch.runner = Runner(lm.model, 1, ROW, chunk=16)
        lm._engine._batch.slots.holders.append(None)
        assert lm._engine.runner.cache.ring
        return talk(lm, 9, wait)

    ahead = held(True)
    idle()
    assert ahead == held(False)


@pytest.mark.long
def test_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, feed, sizes, own = make_lm(LAYOUTS["pad"]), prefill_ahead.feed, random.Random(0), []
    whole = talk(lm, 9)

    def small(runner: Any, refill: Any, columns: int) -> int:
        own.append(feed(runner, refill, sizes.randint(1, 7)))
        return own[-1]

    monkeypatch.setattr(prefill_ahead, "feed", small)
    assert talk(lm, 9) == whole and len(own) > 15


@pytest.mark.long
def test_beside_others_and_without_a_slot_of_its_own() -> None:
    lm = make_lm(LAYOUTS["pad"])
    alone = [talk(lm, 9, seed=seed) for seed in (1, 2, 3)]
    lm._engine = Engine(lm.model, slots=2)
    sessions = [lm.session(**TALK, seed=seed) for seed in (1, 2, 3)]
    got: list[list[tuple[int, ...]]] = [[], [], []]
    for turn in range(9):
        reading = sessions[0].ask(*ASKED[turn % 5])
        next(reading)
        for number in (1, 2):  # one of three has lost its slot
            got[number].append(sessions[number].ask(*ASKED[turn % 5]).answer().tokens)
        list(reading)
        got[0].append(tuple(sessions[0].turns[-1].text or ()))
    for session in sessions:
        session.close()
    spoken = [[tokens if turn % 5 not in (3,) else () for turn, tokens in enumerate(said)] for said in alone]
    assert got == [spoken[0], alone[1], alone[2]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("after", [False, True])
def test_what_was_heard_stays_after_a_barge_in(layout: Layout, begun: list[tuple[Tensor, int]], after: bool) -> None:
    lm, rng = make_lm(layout), random.Random(1)
    with lm.session(**TALK) as session:
        for turn in range(12):
            events = session.ask(*ASKED[turn % 5])
            kept = session.turns
            next(events)
            assert inside(session)._last is not None
            expected = plain_hidden(lm, kept, inside(session)._last.exchange.turn)
            torch.testing.assert_close(begun[-1][0], expected, rtol=1e-4, atol=1e-5)
            if after:
                list(events)
                wait_until_fed(lm)
            session.cancel(played_seconds=rng.random() * 0.4)
            if turn % 2:
                wait_until_fed(lm)


@pytest.mark.long
def test_adapters_act_on_what_is_fed_ahead_and_may_go(layout: Layout, folders: Path, idle: Callable[[], None]) -> None:
    lm = make_lm(layout)
    lm.load_adapter(folders / "wide", "mine")
    mine = talk(lm, 9, adapter="mine")
    with lm.session(**TALK, adapter="mine") as session:
        for turn in range(5):
            session.ask(*ASKED[turn]).answer()
        lm.remove_adapter("mine")
        refill = plan(lm.layout, inside(session)._seat or Seat(0), [*inside(session)._past] * 3, (), inside(session)._selection)
        assert refill is not None
        lm.engine.requests.refill(refill)
        wait_until_fed(lm)
        with pytest.raises(UserError, match="mine"):
            session.ask(*ASKED[0]).answer()
    lm.load_adapter(folders / "wide", "mine")
    idle()
    assert talk(lm, 9, False, adapter="mine") == mine != talk(lm, 9, False)


def test_a_piece_that_fails_empties_the_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, calls = make_lm(LAYOUTS["pad"]), []
    whole = talk(lm, 9)

    def broken(runner: Any, refill: Any, columns: int) -> int:
        calls.append(columns)
        runner.cache.keys[0][refill.seat.slot] = float("nan")
        raise MemoryError("no memory")

    monkeypatch.setattr(prefill_ahead, "feed", broken)
    assert talk(lm, 9) == whole and calls


def test_a_closed_conversation_is_fed_no_more() -> None:
    lm = make_lm(LAYOUTS["pad"])
    session = lm.session(**TALK)
    for turn in range(5):
        session.ask(*ASKED[turn]).answer()
    refill = plan(lm.layout, inside(session)._seat or Seat(0), inside(session)._past * 3, (), None)
    session.close()
    assert refill is not None
    lm.engine.requests.refill(refill)
    wait_until_fed(lm)
    assert refill.seat.slot is None and not any(lm.engine._batch.slots.holders)
    lm.engine.close()
    lm.engine.requests.refill(refill)  # as a listener that comes late: nothing happens
    wait_until_fed(lm)


def test_no_piece_takes_more_than_the_time_there_is() -> None:
    for seconds in (1e-5, 1e-3, 2e-3, 0.01, 0.1):
        for slack in (0.0, 1e-3, 0.02, 0.05, 0.2, 4.0, float("inf")):
            columns = columns_in(slack, seconds)
            assert columns * seconds <= min(slack, max(HOLD, LEAST * seconds)) + 1e-9
            assert columns == 0 or columns >= LEAST
            assert columns or slack < 2 * LEAST * seconds
