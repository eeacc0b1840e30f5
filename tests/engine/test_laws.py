"""Laws 5, 12 and 13: in any company, whoever joins, leaves or is dropped and whenever, a conversation is what it is alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from omni.cpu import use_fast
from omni.cpu.int8 import to_int8
from omni.edit.deltas import Delta, Edits
from omni.engine import answer, stepping
from omni.engine.batch import Slots
from omni.generate.options import GREEDY
from omni.generate.results import AudioChunk, Event, TextDelta
from omni.generate.sampling import Sampling
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from tests.generate.conftest import LAYOUTS, adapt, make_lm, tone

QUESTIONS: list[tuple[Any, str]] = [
    (tone(0.3), "A1A2"), ("and then?", "T1A2"), (tone(0.5, 330.0), "A1A2"), (tone(0.2), "A1T2"), ("say", "T1A1"), ("x", "T1T2")
]  # fmt: skip
SAMPLINGS = [GREEDY, Sampling(1.0, top_k=3), Sampling(1.0, top_k=3, repetition_penalty=1.2)]
ALL = 10**6


class Turn(NamedTuple):
    """A question, and how many events of its answer are taken; what follows is not wanted any more."""

    question: int
    taken: int


class Script(NamedTuple):
    """A conversation."""

    turns: tuple[Turn, ...]
    adapter: str | None
    edits: int | None
    assist: bool
    sampling: int
    seconds: float
    context: int | None


def scripts() -> list[Script]:
    """Conversations to draw from, so that each is held alone once."""
    draw, found = random.Random(0), []
    for _ in range(24):
        turns = tuple(Turn(draw.randrange(len(QUESTIONS)), draw.choice([ALL, ALL, 0, 1, 4])) for _ in range(draw.randint(1, 3)))
        selected = draw.choice([(None, None), (None, None), ("warm", None), ("cold", None), (None, 1), ("warm", 2)])
        assist, context = draw.random() < 0.3, draw.choice([None, None, 64])
        found.append(Script(turns, *selected, assist, draw.randrange(3), draw.choice([0.2, 0.5]), context))
    return found


SCRIPTS = scripts()


def edits_of(lm: SpeechLM, seed: int | None) -> Edits | None:
    if seed is None:
        return None
    g = torch.Generator().manual_seed(seed)
    width = lm.config.decoder.width
    return Edits({"decoder.blocks.1.mlp.down": Delta(torch.randn(1, width, generator=g), torch.randn(1, 48, generator=g))})


@cache
def model(kind: str) -> SpeechLM:
    lm = make_lm(LAYOUTS["pad"], **({"window": 40} if kind == "window" else {}))
    if kind.startswith("int8"):
        to_int8(lm.model)
    compiled = kind.endswith("compiled")  # which the other block's adapters keep it from
    adapt(lm.model, ("decoder.blocks.1.*" if compiled else "decoder.blocks.*",), "warm", "cold")
    if compiled:
        use_fast(lm.model)
    return lm


def start(lm: SpeechLM, script: Script) -> Session:
    return lm.session(
        adapter=script.adapter,
        edits=edits_of(lm, script.edits),
        text_assist=script.assist,
        sampling=SAMPLINGS[script.sampling],
        max_seconds=script.seconds,
        max_tokens=8,
        seed=7,
        context=script.context,
        overflow="forget",
    )


Said = list[tuple[str, Any]]


def what(event: Event) -> tuple[str, Any]:
    if isinstance(event, TextDelta):
        return "text", event.text
    if isinstance(event, AudioChunk):
        return "sound", event.samples
    return "end", (event.reason, event.error)


class Speaker:
    """Holds a conversation a few events at a time."""

    def __init__(self, lm: SpeechLM, script: Script) -> None:
        self.script, self.session = script, start(lm, script)
        self.said: list[Said] = []
        self._turns = iter(script.turns)
        self._events: Iterator[Event] = iter(())
        self._left = 0

    def go_on(self, events: int) -> bool:
        """Take some events, or ask the next question; returns whether the conversation is over."""
        for _ in range(events):
            event = next(self._events, None) if self._left else None
            if event is None:
                return self._ask()
            self._left -= 1
            self.said[-1].append(what(event))
        return False

    def _ask(self) -> bool:
        turn = next(self._turns, None)
        if turn is None:
            self.session.close()
            return True
        self.said.append([])
        self._events, self._left = self.session.ask(*QUESTIONS[turn.question]), turn.taken
        return False


@cache
def alone(kind: str, number: int) -> tuple[list[Said], list[Any]]:
    lm = model(kind)
    lm = SpeechLM(lm.model, lm.tokenizer, lm.codec)
    speaker = Speaker(lm, SCRIPTS[number])
    while not speaker.go_on(ALL):
        pass
    lm.engine.close()
    return speaker.said, history(speaker.session)


def history(session: Session) -> list[Any]:
    return [(t.text, None if t.codes is None else t.codes.tolist(), t.cut) for t in session.turns]


def same(a: list[Said], b: list[Said]) -> None:
    assert [[kind for kind, _ in turn] for turn in a] == [[kind for kind, _ in turn] for turn in b]
    for one, other in zip(a, b, strict=True):
        for (kind, x), (_, y) in zip(one, other, strict=True):
            if kind == "sound":
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
            else:
                assert x == y


def hold(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several conversations at once, in a random order."""
    draw, lm = random.Random(seed), model(kind)
    lm = SpeechLM(lm.model, lm.tokenizer, lm.codec)
    ahead = draw.choice([2, 3, 8, 64])  # few: rows rest and go on in ever other company
    for module in (answer, stepping):
        monkeypatch.setattr(module, "AHEAD", ahead)
    if seed % 2:  # rows move at every question, as they do among many idle ones
        monkeypatch.setattr(
            Slots,
            "closer",
            lambda self, slot, origin: next(n for n, seat in enumerate(self.holders) if n == slot or not (seat and seat.busy)),
        )
    going: list[tuple[int, Speaker]] = []
    with lm.engine.requests.lock:  # some come at the same time
        for number in draw.choices(range(len(SCRIPTS)), k=draw.randint(0, 5)):
            going.append((number, Speaker(lm, SCRIPTS[number])))
            going[-1][1].go_on(1)
    waiting = [draw.randrange(len(SCRIPTS)) for _ in range(draw.randint(1, 5))]
    while waiting or going:
        if waiting and (not going or draw.random() < 0.6):
            number = waiting.pop()
            going.append((number, Speaker(lm, SCRIPTS[number])))
        number, speaker = draw.choice(going)
        if speaker.go_on(draw.choice([1, 2, 5, ALL])):
            said, turns = alone(kind, number)
            same(speaker.said, said)
            assert history(speaker.session) == turns
            going.remove((number, speaker))
        elif draw.random() < 0.05:  # somebody goes without a word
            going.remove((number, speaker))
            if draw.random() < 0.5:
                speaker.session.close()
    lm.engine.close()


KINDS = ["fp32", "int8", "window", "fp32 compiled", "int8 compiled"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_each_conversation_is_what_it_is_alone(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(kind, seed, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_each_conversation_is_what_it_is_alone_in_many_more_schedules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5, 205):
        hold(kind, seed, monkeypatch)
