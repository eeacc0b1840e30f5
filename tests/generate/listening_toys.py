"""Sounds that are pushed in pieces, and conversations that must be the same with them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.encoder.whisper_config import WhisperConfig
from omni.engine import intake
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from tests.close import assert_near
from tests.generate.conftest import LAYOUTS, make_lm
from tests.generate.session_toys import TALKATIVE, inside, same

ENCODER = WhisperConfig(width=16, heads=2, layers=2, window_seconds=3.0, mode="chunked", long_audio="split", chunk_ms=160)
CHUNK = 4
"""Features of a chunk: 8 frames, two of which make one."""

TALK: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 0.4, "max_tokens": 12}
QUESTIONS: list[tuple[Any, str]] = []


def sound(seconds: float, seed: int = 0) -> Tensor:
    return torch.randn(round(seconds * 16_000), generator=torch.Generator().manual_seed(seed)) * 0.1


QUESTIONS += [
    (sound(1.03), "A1A2"),
    ("and?", "T1A2"),
    (sound(0.12, 1), "A1T2"),
    (sound(3.61, 2), "A1A2"),
    (sound(0.5, 3), "A1T1"),
]


def listener(layout: str = "pad", **shape: Any) -> SpeechLM:
    return make_lm(LAYOUTS[layout], **{"encoder": ENCODER} | shape)


@pytest.fixture
def lm() -> Iterator[SpeechLM]:
    lm = listener()
    yield lm
    lm.engine.close()


def pieces(clip: Tensor, most: int = 5000, seed: int = 0) -> Iterator[Tensor]:
    draw, at = random.Random(seed), 0
    while at < len(clip):
        size = draw.choice([0, 1, draw.randrange(most)])
        yield clip[at : at + size]
        at += size


def wait_until_heard(lm: SpeechLM) -> None:
    """Wait until the engine has encoded and fed all that came."""
    requests, end = lm.engine.requests, time.monotonic() + 20
    while requests.refills or any(each.stream._lock.locked() or each.stream.due or each.ready for each in requests.listening()):
        assert time.monotonic() < end, "what came was not heard"
        time.sleep(0.001)


def heard(lm: SpeechLM, session: Session, question: Any, task: str, wait: bool, **options: Any) -> Any:
    """The answer to a question that is pushed in pieces, where it is sound."""
    if not isinstance(question, Tensor):
        return session.ask(question, task).answer()
    listening = session.listen(task)
    for number, piece in enumerate(pieces(question, seed=len(question))):
        listening.push(piece)
        if wait and number % 4 == 0:
            wait_until_heard(lm)
    if wait:
        wait_until_heard(lm)
    return session.ask(listening, task, **options).answer()


def same_cache(lm: SpeechLM, one: Session, other: Session) -> None:
    """Both rows hold the same columns, and keys and values of them."""
    wait_until_heard(lm)
    runner, (a, b) = lm.engine.runner, (inside(one)._seat, inside(other)._seat)
    assert runner is not None and a is not None and b is not None and a.slot is not None and b.slot is not None
    assert [(*key[:-2], key[-1]) for key in a.held.keys] == [(*key[:-2], key[-1]) for key in b.held.keys]
    cache, low = runner.cache, 0 if runner.cache.window is None else len(a.held.keys) - runner.cache.window
    rows = [cache.positions[slot, : cache.slots] for slot in (a.slot, b.slot)]
    wanted = [(row >= low) & (row < len(a.held.keys)) for row in rows]
    assert wanted[0].equal(wanted[1]) and int(wanted[0].sum()) == len(a.held.keys) - max(low, 0)
    for memory in (*cache.keys, *cache.values):
        assert_near(memory[a.slot, : cache.slots][wanted[0]], memory[b.slot, : cache.slots][wanted[1]], 1e-4)


def same_history(one: Session, other: Session) -> None:
    for a, b in zip(one.history, other.history, strict=True):
        assert (a.role, a.text, a.tokens, a.cut, a.seconds) == (b.role, b.text, b.tokens, b.cut, b.seconds)
        assert (a.codes is None) == (b.codes is None) and (a.codes is None or a.codes.equal(b.codes))
    for x, y in zip(inside(one)._past, inside(other)._past, strict=True):
        assert (x.clip is None) == (y.clip is None) and (x.clip is None or y.clip is None or x.clip.equal(y.clip))
        if x.features is not None and y.features is not None:
            assert_near(x.features, y.features, 1e-5)


def equal_conversations(lm: SpeechLM, wait: bool, turns: int = 7, **options: Any) -> None:
    with lm.session(**TALK | options) as one, lm.session(**TALK | options) as other:
        for turn in range(turns):
            question, task = QUESTIONS[turn % len(QUESTIONS)]
            same(heard(lm, one, question, task, wait), other.ask(question, task).answer())
            same_cache(lm, one, other)
            same_history(one, other)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns that were left to prefill, of each question."""
    found, pack = [], intake.pack

    def watched(layout: Any, columns: Any, features: Any, starts: Any) -> Any:
        found.append(len(columns[0]) - starts[0])
        return pack(layout, columns, features, starts)

    monkeypatch.setattr(intake, "pack", watched)
    return found
