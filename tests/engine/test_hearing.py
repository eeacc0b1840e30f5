"""Who encodes a question: whoever asks, where a core is left beside the steps; the stepping thread otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from omni.engine import engine, intake
from omni.generate.sampling import Sampling
from omni.generate.speech_lm import SpeechLM
from tests.generate.conftest import LAYOUTS, make_lm, tone

GREEDY = Sampling(0.0)


@pytest.fixture
def heard_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that encoded something."""
    names: list[str] = []
    encode = intake.encode_questions

    def watched(*args: object) -> object:
        names.append(threading.current_thread().name)
        return encode(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(intake, "encode_questions", watched)
    return names


@pytest.fixture
def lm() -> Iterator[SpeechLM]:
    lm = make_lm(LAYOUTS["pad"])
    yield lm
    lm.engine.close()


@pytest.mark.parametrize(("cores", "who"), [(64, "MainThread"), (1, "omni-engine")])
def test_who_encodes(lm: SpeechLM, heard_by: list[str], monkeypatch: pytest.MonkeyPatch, cores: int, who: str) -> None:
    monkeypatch.setattr(engine, "cores", lambda: cores)
    with lm.session(sampling=GREEDY, max_seconds=0.3) as session:
        first = session.ask(tone(0.3)).answer()
        session.ask(tone(0.4)).answer()
    assert heard_by == [who] * 2  # the second time the second question alone
    monkeypatch.setattr(engine, "cores", lambda: 65 - cores)
    with lm.session(sampling=GREEDY, max_seconds=0.3) as session:
        other = session.ask(tone(0.3)).answer()
    assert heard_by[-1] != who and other.text == first.text
    assert other.codes is not None and first.codes is not None and torch.equal(other.codes, first.codes)


def test_one_at_a_time(lm: SpeechLM, heard_by: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "cores", lambda: 64)
    monkeypatch.setattr(engine, "WAIT", 0.01)
    with lm.engine._encoding, lm.session(sampling=GREEDY, max_seconds=0.3) as session:
        session.ask(tone(0.3)).answer()
    assert heard_by == ["omni-engine"]
