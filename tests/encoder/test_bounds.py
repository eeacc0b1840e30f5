"""Attention inside each clip by the clips' bounds, as a GPU takes it in half precision, is that of groups of clips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.encoder.base import collate
from omni.encoder.whisper import WhisperEncoder
from omni.encoder.whisper_config import WhisperConfig
from omni.model.attention import _packed_attention
from tests.close import assert_near
from tests.encoder.test_whisper import CONFIGS, SMALL, clips, run
from tests.test_attention import varlen_reference


@pytest.mark.sampled(3)
@CONFIGS
@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_by_bounds_is_that_by_groups(
    config: WhisperConfig, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU attends in half precision, with a stand-in for its kernel."""
    encoder, found, asked = WhisperEncoder(config), [], []

    def stand_in(*args: Any, **options: Any) -> Tensor:
        asked.append(args[3].diff().tolist())
        return varlen_reference(*args, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    monkeypatch.setattr("omni.model.attention._segment_attention", _packed_attention)
    encoder.checkpointing = checkpointing
    for bounds in (False, True):
        monkeypatch.setattr("omni.encoder.whisper.takes_packed", lambda *_, bounds=bounds: bounds)
        encoder.zero_grad()
        out = run(encoder, clips())
        out.sin().sum().backward()
        found.append([out, *(p.grad for p in encoder.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert asked == [sorted((config.features(clip).shape[1] + 1) // 2 for clip in clips())] * len(asked)
    assert len(asked) == config.layers * (2 if checkpointing else 1)
    assert encoder(torch.zeros(0, config.n_mels, 0), [], []).shape == (0, config.width)


@pytest.mark.cuda
def test_attention_by_bounds_on_a_gpu() -> None:
    encoder = WhisperEncoder(replace(SMALL, width=128)).cuda()
    mels, lengths = collate([encoder.config.features(clip) for clip in clips()])
    frames = [encoder.config.frames(len(clip)) for clip in clips()]
    found = []
    for half in (False, True):
        encoder.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            out = encoder(mels.cuda(), lengths, frames)
        out.sin().sum().backward()
        found.append((out, encoder.whisper.blocks[0].attn.query.weight.grad))
    for exact, ours in zip(*found, strict=True):
        assert_near(ours.float(), exact, relative=0.05)
