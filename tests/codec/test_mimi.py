"""Mimi: parity with transformers' MimiModel, and exact streams."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import MimiModel

from omni.codec.mimi import ENCODE_FRAMES, MimiCodec
from omni.layout import Layout
from tests.codec.mimi_toys import ODD, PLAIN, random_sound, save
from tests.codec.test_codec import random_codes


class Pair(NamedTuple):
    """Folder of random weights, transformers' model of it, and our codec of it."""

    folder: Path
    model: MimiModel
    codec: MimiCodec


@pytest.fixture(scope="module", params=["plain", "odd"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    save(*{"plain": (PLAIN, folder, 0.02), "odd": (ODD, folder, 0.01)}[request.param])
    return Pair(folder, MimiModel.from_pretrained(folder).eval(), MimiCodec.from_folder(folder))


@torch.no_grad()
def reference_decode(model: MimiModel, codes: Tensor) -> Tensor:
    return model.decode(codes[None]).audio_values[0, 0]


@torch.no_grad()
def reference_encode(model: MimiModel, audio: Tensor, codebooks: int) -> Tensor:
    return model.encode(audio[None, None], num_quantizers=codebooks).audio_codes[0]


# -- against transformers ------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("frames", [1, 2, 3, 40])
def test_decoding_equals_transformers(pair: Pair, frames: int) -> None:
    codes = random_codes(pair.codec, frames)
    expected = reference_decode(pair.model, codes)
    assert expected.std() > 0.03 and expected.abs().max() < 1
    decoded = pair.codec.decode(codes)
    assert decoded.shape == (frames * pair.codec.frame_samples,)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frames", [1, 4, 2 * ENCODE_FRAMES + 7])
def test_encoding_equals_transformers(pair: Pair, frames: int) -> None:
    audio = random_sound(frames * pair.codec.frame_samples)
    expected = reference_encode(pair.model, audio, len(pair.codec.codebook_sizes))
    assert frames < 40 or all(len(row.unique()) > 2 for row in expected)
    assert torch.equal(pair.codec.encode(audio), expected)


def test_the_last_frame_is_filled_up_with_silence(pair: Pair) -> None:
    size = pair.codec.frame_samples
    for samples in (1, size - 1, 5 * size + 3):
        audio = random_sound(samples)
        filled = torch.cat([audio, torch.zeros(-samples % size)])
        codes = pair.codec.encode(audio)
        assert torch.equal(codes, reference_encode(pair.model, filled, 8)) and codes.shape[1] == pair.codec.frames(samples)


def test_fewer_and_more_codebooks(pair: Pair) -> None:
    most = pair.codec.config.num_quantizers
    audio = random_sound(6 * pair.codec.frame_samples)
    for codebooks in {pair.codec.config.num_semantic_quantizers, 4, most}:
        codec = MimiCodec.from_folder(pair.folder, codebooks=codebooks)
        codes = codec.encode(audio)
        assert codec.name == f"mimi-{codebooks}" and codec.codebook_sizes == (16,) * codebooks
        assert torch.equal(codes, reference_encode(pair.model, audio, most)[:codebooks])
        torch.testing.assert_close(codec.decode(codes), reference_decode(pair.model, codes), rtol=0, atol=1e-5)


def test_sound_beyond_full_scale_is_cut_off(tmp_path: Path) -> None:
    save(PLAIN, tmp_path, gain=2.0)
    codec = MimiCodec.from_folder(tmp_path)
    codes = random_codes(codec, 10)
    expected = reference_decode(MimiModel.from_pretrained(tmp_path).eval(), codes)
    assert expected.max() > 2 and expected.min() < -2
    torch.testing.assert_close(codec.decode(codes), expected.clamp(-1, 1), rtol=0, atol=1e-4)


# -- streams -------------------------------------------------------------------------------------------------


def test_what_a_stream_keeps_does_not_grow(pair: Pair) -> None:
    stream, kept = pair.codec.stream(), []
    for frames in (1, 40):
        stream.push(random_codes(pair.codec, frames))
        streams = vars(stream)["_streams"]  # whole storages: views count for all they keep alive
        held = [streams._state, streams._words, *streams.caches]
        kept.append(len(pickle.dumps([vars(one) if hasattr(one, "__dict__") else one for one in held])))
    assert kept[1] - kept[0] < 64  # digits of the position


def test_the_real_size() -> None:
    codec = MimiCodec.random(0, num_hidden_layers=1, intermediate_size=64, num_quantizers=10)
    assert (codec.name, codec.sample_rate, codec.frame_samples, codec.frame_rate) == ("mimi", 24000, 1920, 12.5)
    assert codec.codebook_sizes == (2048,) * 8 and codec.deterministic
    sound = codec.decode(random_codes(codec, 2))
    assert sound.shape == (3840,) and sound.std() > 0.01
    assert torch.equal(codec.decode(codec.encode(sound)), codec.decode(codec.encode(sound), seed=1))
    assert Layout.build(codec.codebook_sizes, 32000).codebook_sizes == codec.codebook_sizes
