"""Traps that other projects fell into, each told as a test that passes because of the design.

The cache's own (training through it, writes lost under bf16) stand in `tests/model/test_kv_cache.py`, a stream without targets
in `tests/train/objective/test_objective.py`, features that depend on the clip's end in `tests/audio/test_mel.py`, and
Fabric's in `tests/train/distributed/test_fabric.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch

from omni.config import DecoderConfig, ModelConfig
from omni.encoder.whisper_config import WhisperConfig
from omni.generate.speech_lm import SpeechLM
from omni.layout import IGNORE, Layout
from omni.model.kv_cache import FunctionalKVCache
from omni.model.speech_model import SpeechModel
from omni.tasks import Turn, example
from omni.text import Tokenizer
from tests.close import assert_near
from tests.model.conftest import random_tokens

LAYOUTS = {"codec2": Layout.preset("codec2"), "mini-omni": Layout.preset("mini-omni", text_size=256)}


@pytest.fixture(params=LAYOUTS)
def model(request) -> SpeechModel:
    torch.manual_seed(0)
    return SpeechModel(
        ModelConfig(
            LAYOUTS[request.param],
            WhisperConfig(width=16, heads=2, layers=1, window_seconds=2.0),
            decoder=DecoderConfig(width=32, layers=2, heads=4, kv_heads=2, mlp_width=48, context=256),
        )
    )


def test_a_mask_never_changes_between_forward_and_backward(model):
    """A fine-tuning script kept one mask and refilled it in place for each batch: with checkpointing the backward pass
    recomputed under the next batch's mask, or died with "is at version 34; expected version 32". Our masks are new
    in each forward, so two forwards before their backwards give what one at a time gives."""
    decoder, layout = model.decoder, model.layout
    decoder.checkpointing = True
    batches = [(random_tokens(layout, 1, 12, seed), (torch.arange(12) >= cut).long()[None]) for seed, cut in ((1, 3), (2, 8))]
    wanted = []
    for tokens, segments in batches:
        decoder.zero_grad()
        decoder(tokens, segments=segments).audio.square().sum().backward()
        wanted.append({n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None})
    decoder.zero_grad()
    losses = [decoder(tokens, segments=segments).audio.square().sum() for tokens, segments in batches]
    for loss in losses:
        loss.backward()
    for name, p in decoder.named_parameters():
        if name in wanted[0]:
            assert_near(p.grad, wanted[0][name] + wanted[1][name], 1e-5, name)


def test_checkpointing_reaches_parameters_behind_frozen_inputs(model):
    """Reentrant checkpointing gives no gradient to anything inside when no input needs one: 42 of 44 adapters learned nothing,
    in silence. Ours is non-reentrant."""
    for name, p in model.named_parameters():
        p.requires_grad_(".attention.q." in name)
    model.set_checkpointing(True)
    model.decoder(random_tokens(model.layout, 1, 6)).audio.square().sum().backward()
    learning = [p for p in model.parameters() if p.requires_grad]
    assert len(learning) == 2 and all(p.grad is not None and p.grad.any() for p in learning)


def test_the_true_end_is_trained(model):
    """With pad := eos, masking the padding masks every answer's end too, and the model never stops. Here end and pad are two
    ids, and each answer's end is a target on every stream that answers."""
    layout = model.layout
    codes = torch.zeros(layout.n_audio, 3, dtype=torch.long)
    columns = example(layout, [Turn("T1A2", question=[1, 2], text=[3], codes=codes)])
    for k, s in enumerate(layout.streams):
        assert s.special("end") != s.special("pad")
        assert (columns.targets[k] == s.special("end")).sum() == 1
        trained_pads = ((columns.targets[k] == s.special("pad")) & (columns.targets[k] != IGNORE)).sum()
        assert layout.fill == "sampled" or trained_pads == 0


def test_checkpointing_through_a_functional_cache_recomputes_nothing_twice(model):
    """A cache held as module state is written again when a block is recomputed: 36 % gradient error and no exception. Our
    blocks are not recomputed while a cache is passed in. In float64, as gradients of norms all but cancel."""
    decoder, tokens = model.decoder.double(), random_tokens(model.layout, 1, 6)
    twin = copy.deepcopy(decoder)
    twin(tokens).audio.square().sum().backward()
    decoder.checkpointing = True
    cache, parts = FunctionalKVCache(2), []
    for at in (0, 3):
        pos = torch.arange(at, at + 3)[None]
        parts.append(decoder(tokens[:, :, at : at + 3], input_pos=pos, cache=cache).audio)
    torch.cat(parts, 1).square().sum().backward()
    for (name, a), b in zip(twin.named_parameters(), decoder.parameters(), strict=True):
        if a.grad is not None:
            assert_near(b.grad, a.grad, 1e-8, name)


@pytest.mark.untrained("encoder.*", "projector.*", "*head.weight")
def test_talking_in_the_middle_of_training_changes_nothing(model):
    """Law 4, and a trap: evaluation under `inference_mode` leaves inference tensors behind (rotary tables, masks, caches),
    and the next training step dies on them. A turn with the model between two steps leaves weights, keys and the next
    step bitwise as they were."""
    tokens = random_tokens(model.layout, 2, 8)
    twin = copy.deepcopy(model)
    for m, talk in ((model, True), (twin, False)):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        for _ in range(2):
            m(tokens).audio.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if talk:
                SpeechLM(m, Tokenizer.bytes()).generate("hi", "T1A2", max_tokens=5)
    assert model.state_dict().keys() == twin.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name
    assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))
