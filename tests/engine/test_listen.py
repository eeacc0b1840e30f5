"""Laws 5, 12 and 13 with questions that are heard while they come: whoever listens, joins, drops or leaves, and whenever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from omni.engine.engine import Engine
from omni.engine.intake import Intake
from omni.generate.results import AudioChunk, Ended, TextDelta
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.lora.attach import activate, add_adapter, remove_adapter
from omni.lora.config import LoRAConfig
from tests.generate.conftest import SHAPES, adapt
from tests.generate.listening_toys import listener, pieces, sound, wait_until_heard
from tests.generate.session_toys import TALKATIVE, inside, same
from tests.soon import soon

QUESTIONS: list[tuple[Any, str]] = [
    (sound(0.7, 1), "A1A2"), ("and then?", "T1A2"), (sound(1.4, 2), "A1A2"), (sound(0.2, 3), "A1T2"), (sound(2.0, 4), "A1A2")
]  # fmt: skip
ALL = 10**6


class Script:
    """A conversation: its options, and of each turn the question, how it is asked, and how many events are taken."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.turns = [
            (draw.randrange(5), draw.choice(["heard", "heard", "whole", "iterator", "dropped"]), draw.choice([ALL, ALL, 0, 3]))
            for _ in range(draw.randint(2, 4))
        ]
        self.options: dict[str, Any] = {
            "adapter": draw.choice([None, None, "warm"]),
            "text_assist": draw.random() < 0.2,
            "context": draw.choice([180, 400]),
            "overflow": "forget",
            "sampling": TALKATIVE,
            "max_seconds": 0.3,
            "max_tokens": 8,
            "seed": seed,
        }


SCRIPTS = [Script(seed) for seed in range(16)]


@cache
def model(shape: str) -> SpeechLM:
    lm = listener(**SHAPES[shape])
    adapt(lm.model, ("decoder.blocks.*", "encoder.*"), "warm")
    return lm


def shown(events: list[Any]) -> tuple[Any, ...]:
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    audio = [event.samples.tolist() for event in events if isinstance(event, AudioChunk)]
    return text, audio, [event.reason for event in events if isinstance(event, Ended)]


def hold(session: Session, script: Script, whole: bool) -> Iterator[Any]:
    """Hold a conversation, and pause where others may go on; gives what was said at last."""
    said = []
    for number, (question, how, count) in enumerate(script.turns):
        asked, task = QUESTIONS[question]
        listening: Any = None
        if isinstance(asked, torch.Tensor) and not whole:
            if how == "dropped":
                listening = session.listen(task)
                listening.push(sound(1.0, 90 + number))
                yield None
                listening.drop()
            if how in ("heard", "dropped"):
                listening = session.listen(task)
                for piece in pieces(asked, seed=number):
                    listening.push(piece)
                    yield None
            elif how == "iterator":
                listening = pieces(asked, seed=number)
        events = session.ask(asked if listening is None else listening, task)
        found = []
        for event in events:
            found.append(event)
            if len(found) > count:
                session.cancel()
                break
            yield None
        said.append(shown(found))
        yield None
    yield said, [(turn.features, turn.text) for turn in session.turns]


@cache
def alone(shape: str, seed: int) -> Any:
    with model(shape).session(**SCRIPTS[seed].options) as session:
        return [step for step in hold(session, SCRIPTS[seed], True) if step is not None][-1]


@pytest.mark.long
@pytest.mark.parametrize("slots", [None, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_a_conversation_is_what_it_is_alone(shape: str, slots: int | None, seed: int) -> None:
    lm, draw = model(shape), random.Random(seed)
    wanted = [alone(shape, number) for number in range(len(SCRIPTS))]
    lm.engine.close()
    lm._engine = Engine(lm.model, slots=slots, context=400 if slots else None)
    waiting = list(range(len(SCRIPTS)))
    draw.shuffle(waiting)
    talks: dict[int, tuple[Session, Iterator[Any]]] = {}
    while waiting or talks:
        while waiting and len(talks) < 5:
            number = waiting.pop()
            session = lm.session(**SCRIPTS[number].options)
            talks[number] = session, hold(session, SCRIPTS[number], False)
        number = draw.choice(list(talks))
        session, steps = talks[number]
        for _ in range(draw.choice([1, 1, 5, 30])):
            step = next(steps)
            if step is not None:
                assert step == wanted[number]
                session.close()
                del talks[number]
                break
        if draw.random() < 0.1:
            time.sleep(0.002)
    lm.engine.close()
    lm._engine = None


def test_nothing_is_heard_ahead_while_somebody_s_sound_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    slacks: list[float] = []
    listen = Intake.listen

    def watched(self: Intake, each: Any, open: Any, slack: float) -> bool:
        done = listen(self, each, open, slack)
        if done:
            slacks.append(slack)
        return done

    monkeypatch.setattr(Intake, "listen", watched)
    lm = listener()
    options: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 3.0, "max_tokens": 10**4}
    with lm.session(pace="live", **options) as live, lm.session(**options) as other:
        events = live.ask(sound(0.3))
        listening = other.listen()
        for piece in sound(2.0, 5).split(1600):
            listening.push(piece)
            next(events)
        live.cancel()
        wait_until_heard(lm)
        assert slacks and min(slacks) > 0
        assert 0 < lm.engine.stats().hearing < 60  # seconds, of all pieces
        with lm.session(**options) as alone:
            same(other.ask(listening).answer(), alone.ask(sound(2.0, 5)).answer())


def test_who_only_reads_is_stepped_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that reads as fast as it can, and one that pushes, both come on."""
    lm = listener()
    options: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 60.0, "max_tokens": 10**4}
    with lm.session(**options) as one, lm.session(**options) as two:
        events, stop = one.ask(sound(0.3)), threading.Event()
        count = [0]

        def read() -> None:
            for _ in events:
                count[0] += 1
                if stop.is_set():
                    return

        thread = threading.Thread(target=read)
        thread.start()
        listening = two.listen()
        for piece in sound(2.0, 5).split(1600):
            listening.push(piece)
        assert soon(lambda: not inside(two)._hears.due)
        before = count[0]
        assert soon(lambda: count[0] >= before + 5)
        stop.set()
        one.cancel()
        thread.join(20)


def test_an_adapter_may_be_removed_while_its_conversation_is_listened_to() -> None:
    lm = listener()
    add_adapter(lm.model, LoRAConfig(("decoder.blocks.*",), rank=2), "brief")
    activate(lm.model)
    with lm.session(adapter="brief", max_seconds=0.3) as session, lm.session(max_seconds=0.3) as other:
        listening = session.listen()
        listening.push(sound(0.7))
        wait_until_heard(lm)
        remove_adapter(lm.model, "brief")
        listening.push(sound(0.7))
        with pytest.raises(Exception, match="brief"):
            session.ask(listening)
        assert other.ask(sound(0.3)).answer().ended in ("end", "length")
