"""Adapters chosen by session: each answers as a model with that adapter in its weights, alone and in company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omni.cpu.int8 import to_int8
from omni.errors import UserError
from omni.generate.options import GREEDY
from omni.generate.runner import Runner
from omni.generate.sampling import Sampling
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.lora.attach import adapted
from omni.lora.peft import merged_state
from omni.model.speech_model import SpeechModel
from tests.generate.conftest import TARGETS, make_lm, tone
from tests.generate.session_toys import equal

DRAWN = Sampling(temperature=0.8)


def merged(layout: Layout, folder: Path) -> SpeechLM:
    """A model with the adapter in its weights, and nothing else."""
    lm = make_lm(layout)
    lm.load_adapter(folder)
    for part in lm.model.modules():
        if hasattr(part, "lora"):
            part.lora.active.names = (folder.name,)
    plain = make_lm(layout)
    state = merged_state(lm.model, lm.model.state_dict())
    plain.model = SpeechModel.from_state(lm.config, state).eval()
    return plain


@pytest.mark.sampled(1)
@pytest.mark.parametrize("assist", [False, True])
def test_each_session_answers_with_its_own(layout: Layout, folders: Path, assist: bool) -> None:
    lm = make_lm(layout)
    assert [lm.load_adapter(folders / name) for name in TARGETS] == list(TARGETS)
    options = {"sampling": DRAWN, "seed": 3, "max_seconds": 1.0, "text_assist": assist}
    found = {name: lm.generate(tone(0.5), adapter=name, **options) for name in (None, *TARGETS)}  # type: ignore[arg-type]
    assert equal(found[None], make_lm(layout).generate(tone(0.5), **options))  # type: ignore[arg-type]
    for name in TARGETS:
        assert equal(found[name], merged(layout, folders / name).generate(tone(0.5), **options)), name  # type: ignore[arg-type]
    assert not equal(found["small"], found["wide"]) and not equal(found[None], found["small"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("numbers", ["fp32", "int8"])
def test_rows_of_a_batch_have_their_own(layout: Layout, folders: Path, numbers: str) -> None:
    lm, sampling = make_lm(layout), DRAWN
    if numbers == "int8":
        to_int8(lm.model)
        sampling = GREEDY  # int8 may round what comes in the other way for a last bit of a sum, which can turn a draw
    for name in TARGETS:
        lm.load_adapter(folders / name)
    questions = [tone(0.3 + 0.1 * i, 200 + 30 * i) for i in range(6)]
    names = [None, "wide", "small", "wide", None, "small"]
    together = lm.generate(questions, seed=5, sampling=sampling, max_seconds=0.8, batch_size=4, adapter=names)
    for question, name, answer in zip(questions, names, together, strict=True):
        assert equal(answer, lm.generate(question, seed=5, sampling=sampling, max_seconds=0.8, adapter=name)), name
    everyone = lm.generate(questions[:2], max_seconds=0.8, adapter="small")
    assert equal(everyone[1], lm.generate(questions[1], max_seconds=0.8, adapter="small"))


def test_adapters_can_be_listed_and_removed(layout: Layout, folders: Path) -> None:
    lm = make_lm(layout)
    assert lm.adapters == ()
    plain = lm.generate(tone(0.4), max_seconds=0.4)
    for name in TARGETS:
        lm.load_adapter(folders / name)
    assert lm.adapters == tuple(TARGETS) and "2 adapters" in repr(lm)
    with lm.session(adapter="wide") as session:
        lm.remove_adapter("wide")
        assert lm.adapters == ("small",)
        with pytest.raises(UserError, match="no adapter 'wide'; the model's adapters are small"):
            session.ask(tone(0.4)).answer()
    with pytest.raises(UserError, match="no adapter 'wide'; the model's adapters are small"):
        lm.remove_adapter("wide")
    lm.remove_adapter("small")
    with pytest.raises(UserError, match="the model's adapters are none"):
        lm.remove_adapter("small")
    assert equal(lm.generate(tone(0.4), max_seconds=0.4), plain)
    assert lm.load_adapter(folders / "small") == "small"


def test_an_adapter_stays_while_an_answer_uses_it(layout: Layout, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_lm(layout)
    for name in TARGETS:
        lm.load_adapter(folders / name)
    used = "'small' is used by an answer under way; end that answer, or cancel it, first"
    with lm.session(adapter="small", max_seconds=0.8) as session:
        events = session.ask(tone(0.4))
        next(events)
        with pytest.raises(UserError, match=used):
            lm.remove_adapter("small")
        lm.remove_adapter("wide")
        session.cancel()
        lm.remove_adapter("small")
    lm.load_adapter(folders / "small")
    lm.session(adapter="small").ask(tone(0.4))  # both are let go
    step, refused = Runner.step, []

    def removing(runner: Runner, *rows: Any) -> None:
        with pytest.raises(UserError, match=used):
            lm.remove_adapter("small")
        refused.append(True)
        step(runner, *rows)

    monkeypatch.setattr(Runner, "step", removing)
    lm.generate([tone(0.4)], adapter="small", max_seconds=0.2)
    lm.remove_adapter("small")
    assert refused and lm.adapters == ()


@pytest.mark.sampled(1)
def test_another_adapter_of_the_same_name_answers_with_nothing_of_the_first(layout: Layout, folders: Path) -> None:
    """What a session's cache holds was made with the first."""
    lm, options = make_lm(layout), {"adapter": "mine", "max_seconds": 0.6}
    lm.load_adapter(folders / "small", "mine")
    with lm.session(**options) as session:
        list(session.ask(tone(0.4)))
        lm.remove_adapter("mine")
        lm.load_adapter(folders / "small", "mine")
        with torch.no_grad():
            for part in adapted(lm.model).values():
                part.mine.b.mul_(-8)
        past = session.history
        events = session.ask("hello", "T1A2")
        next(events)
        session.cancel()
        found = session.ask("and", "T1A2").answer()
    with lm.session(history=past, **options) as session:
        events = session.ask("hello", "T1A2")
        next(events)
        session.cancel()
        assert equal(found, session.ask("and", "T1A2").answer())
