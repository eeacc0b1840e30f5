"""Where a model hears a question end: over pieces of a sound, from a folder, and after a head has learned it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni.checkpoint.folder import load_folder, save_folder
from omni.convert.omni_folder import quantize_folder
from omni.encoder.base import collate
from omni.encoder.whisper_config import WhisperConfig
from omni.generate.listening import END, VOICE, EndRule, TurnListener, ended
from omni.model.speech_model import SpeechModel
from tests.train.data.toys import MODELS, TOKENIZER
from train.data.augment import speech
from train.data.batching.examples import turn_labels
from train.objective.objective import turn_loss

ENCODER = WhisperConfig(width=32, heads=2, layers=1, window_seconds=4.0, mode="chunked", hop=320, chunk_ms=160)
CONFIG = replace(MODELS["codec2"], encoder=ENCODER, turn=True, codec="codec2")


def model_of(seed: int = 0) -> SpeechModel:
    torch.manual_seed(seed)
    return SpeechModel(CONFIG).eval()


def tone(hertz: float, seconds: float) -> Tensor:
    return 0.3 * torch.sin(2 * torch.pi * hertz * torch.arange(round(16_000 * seconds)) / 16_000)


def question(pause: float, before: float = 0.2, after: float = 1.0) -> Tensor:
    """A low tone, after which a high one must come, which is the end."""
    silences = [torch.zeros(round(16_000 * seconds)) for seconds in (before, pause, after)]
    return torch.cat([silences[0], tone(300, 0.4), silences[1], tone(1500, 0.4), silences[2]])


def in_pieces(listener: TurnListener, sound: Tensor, most: int, seed: int) -> Tensor:
    draw, stream, found = random.Random(seed), listener.encoder.stream(), []
    while len(sound):
        size = draw.randrange(most)
        found.append(listener.probabilities(stream.push(sound[:size])))
        sound = sound[size:]
    return torch.cat([*found, listener.probabilities(stream.finish())])


def test_any_split_gives_the_same_decisions_and_those_of_the_whole() -> None:
    model, sound = model_of(), question(0.5)
    listener = TurnListener.of(model)
    once = in_pieces(listener, sound, 20_000, 0)
    for most in (500, 7000):
        assert in_pieces(listener, sound, most, most).equal(once)
    whole = model.turn_head(model.encoder.encode([sound])[0]).sigmoid()
    torch.testing.assert_close(once, whole, rtol=1e-5, atol=1e-5)
    for threshold in (0.3, 0.5):
        assert ended(once, EndRule(threshold)).equal(ended(whole, EndRule(threshold)))


def test_a_turn_has_ended_after_so_many_sure_frames_in_a_row() -> None:
    sure = torch.tensor([0.9, 0.1, 0.9, 0.8, 0.79, 0.9, 0.9, 0.9])
    both = torch.stack([torch.zeros(8), sure], dim=1)
    assert ended(both, EndRule(0.8, 1)).tolist() == (sure >= 0.8).tolist()
    assert ended(both, EndRule(0.8, 2)).int().tolist() == [0, 0, 0, 1, 0, 0, 1, 1]
    assert ended(both, EndRule(0.8, 9)).int().tolist() == [0] * 8
    assert len(ended(both[:0], EndRule(0.8, 2))) == 0


def test_a_folder_keeps_the_head_in_full_precision_and_in_int8(tmp_path: Path) -> None:
    model, sound = model_of(), question(0.3)
    wanted = in_pieces(TurnListener.of(model), sound, 9000, 1)
    save_folder(tmp_path / "model", CONFIG, model.state_dict(), TOKENIZER)
    loaded = load_folder(tmp_path / "model")
    assert loaded.config == CONFIG and loaded.model.turn_head is not None
    listener = TurnListener.from_folder(tmp_path / "model")
    assert listener is not None and in_pieces(listener, sound, 9000, 1).equal(wanted)
    quantize_folder(tmp_path / "model", tmp_path / "int8")
    small = TurnListener.from_folder(tmp_path / "int8")
    assert small is not None
    torch.testing.assert_close(in_pieces(small, sound, 9000, 1), wanted, rtol=0, atol=0.05)


@pytest.mark.long
def test_a_head_that_has_learned_it_ends_the_turn_after_the_end_and_not_in_the_pause() -> None:
    model = model_of()
    model.train()
    draw = random.Random(0)
    optimizer = torch.optim.AdamW([*model.encoder.parameters(), *model.turn_head.parameters()], lr=6e-3)
    for _ in range(45):
        sounds = [question(draw.uniform(0.2, 1.0), draw.uniform(0, 0.4), draw.uniform(0.2, 0.8)) for _ in range(4)]
        features = [ENCODER.features(sound) for sound in sounds]
        frames = [ENCODER.clip_frames(len(sound)) for sound in sounds]
        labels = torch.cat([turn_labels(speech(mel), n) for mel, n in zip(features, frames, strict=True)])
        loss = turn_loss(model.turn_head(model.encoder.run(*collate(features), frames)), labels) / (labels >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    listener = TurnListener.of(model)
    for pause in (0.4, 0.7, 0.9):
        found = in_pieces(listener, question(pause), 3000, 0)
        places = ended(found, EndRule(0.6, 2)).nonzero().flatten() / ENCODER.frames_per_second
        end = 0.2 + 0.4 + pause + 0.4
        assert end <= float(places[0]) <= end + 0.35
        voice = found[:, VOICE] > 0.5
        assert voice[8:14].all() and not voice[:3].any() and found[-1, END] > 0.9
