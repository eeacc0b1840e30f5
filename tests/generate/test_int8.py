"""Adapters and edits beside linears in int8: they act as beside the dequantised weights, and each row by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni.cpu.int8 import Int8Embedding, Int8Linear, to_int8
from omni.edit.deltas import Delta, Edits, edited_everywhere
from omni.edit.storage import load_edits, save_edits
from omni.errors import UserError
from omni.generate.sampling import Sampling
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.lora.attach import activate, attach
from omni.lora.peft import load_adapter
from tests.generate.conftest import TARGETS, make_lm, tone
from tests.generate.session_toys import equal

DRAWN = Sampling(temperature=0.8)
NEAR, FAR = 0.06, 0.15
"""Relative distances of logits: of int8, which rounds what comes in too, and of what acts."""


def quantised(layout: Layout, **more: object) -> SpeechLM:
    lm = make_lm(layout, **more)
    to_int8(lm.model)
    return lm


def dequantised(layout: Layout, **more: object) -> SpeechLM:
    """The model in full precision whose weights are those that int8 stands for."""
    lm, held = make_lm(layout, **more), quantised(layout, **more).model
    with torch.no_grad():
        for name, part in held.named_modules():
            if isinstance(part, (Int8Linear, Int8Embedding)):
                dense = part.dequantize() if isinstance(part, Int8Linear) else part.dense()
                lm.model.get_submodule(name).weight.copy_(dense)
    return lm


def logits(lm: SpeechLM) -> Tensor:
    tokens = torch.stack(
        [torch.randint(s.size, (2, 9), generator=torch.Generator().manual_seed(1)) for s in lm.layout.streams], 1
    )
    with torch.no_grad():
        return torch.cat(lm.model.decoder.logits(lm.model(tokens)), -1)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_acts_as_beside_the_dequantised_weights(layout: Layout, folders: Path, name: str) -> None:
    found, wanted = quantised(layout), dequantised(layout)
    before = logits(wanted)
    assert apart(logits(found), before) < NEAR
    assert found.load_adapter(folders / name) == name
    attach(wanted.model, load_adapter(folders / name).modules(), name)  # unchecked: it was trained beside others
    for lm in (found, wanted):
        activate(lm.model, name)
    assert apart(logits(found), logits(wanted)) < NEAR < FAR < apart(logits(wanted), before)


def test_an_adapter_of_another_model_is_refused(layout: Layout, folders: Path) -> None:
    other = make_lm(layout, seed=1)
    to_int8(other.model)
    with pytest.raises(UserError, match="their checksum differs"):
        other.load_adapter(folders / "small")
    with pytest.raises(UserError, match="has adapters or edits beside it"):
        lm = make_lm(layout)
        lm.load_adapter(folders / "small")
        to_int8(lm.model)


@pytest.mark.sampled(1)
def test_edits_act_as_beside_the_dequantised_weights(layout: Layout, tmp_path: Path) -> None:
    """And each row by itself; edits that were signed by the weights in full precision fit."""
    plain, found, wanted = make_lm(layout), quantised(layout), dequantised(layout)
    g, deltas = torch.Generator().manual_seed(3), {}
    for name in ("decoder.blocks.1.mlp.up", "decoder.blocks.0.mlp.down", "decoder.blocks.0.attention.q"):
        outputs, inputs = plain.model.get_submodule(name).weight.shape
        deltas[name] = Delta(torch.randn(3, outputs, generator=g), torch.randn(3, inputs, generator=g), 0.1)
    before = logits(wanted)
    with edited_everywhere(found.model, Edits(deltas)), edited_everywhere(wanted.model, Edits(deltas)):
        assert apart(logits(found), logits(wanted)) < NEAR < FAR < apart(logits(wanted), before)
    save_edits(tmp_path / "edits", Edits(deltas).signed(plain.model))
    own, asked = load_edits(tmp_path / "edits", found.model), {"max_seconds": 0.6}
    answers = found.generate([tone(0.3), tone(0.5)], edits=[own, None], **asked)  # type: ignore[arg-type]
    assert equal(answers[0], found.generate(tone(0.3), edits=own, **asked))  # type: ignore[arg-type]
    assert equal(answers[1], found.generate(tone(0.5), **asked))  # type: ignore[arg-type]
    assert not equal(answers[0], found.generate(tone(0.3), **asked))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="model"):
        load_edits(tmp_path / "edits", quantised(layout, seed=1).model)


@pytest.mark.sampled(1)
def test_a_tied_model_answers_the_same_alone(layout: Layout) -> None:
    """Whose text head and table are one tensor in int8."""
    lm = quantised(layout, tie_text=True)
    assert lm.model.decoder.text_head is None and isinstance(lm.model.decoder.text_embedding, Int8Embedding)
    questions = [tone(0.3 + 0.1 * i, 200 + 30 * i) for i in range(5)]
    asked = {"seed": 2, "sampling": DRAWN, "max_seconds": 0.8}
    for question, answer in zip(questions, lm.generate(questions, **asked), strict=True):  # type: ignore[arg-type]
        assert equal(answer, lm.generate(question, **asked))  # type: ignore[arg-type]
