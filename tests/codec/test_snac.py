"""SNAC: order of codes, parity with the package's own coder, the noise, and reading folders."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from snac import SNAC
from snac.layers import NoiseBlock
from torch import Tensor

from omni.codec.registry import load_codec
from omni.codec.snac import SNAC_24KHZ, Noise, SnacCodec, from_levels, keyed_noise, mix32, noise_key, stream_levels, to_levels
from omni.errors import UserError
from tests.codec.mimi_toys import Malicious
from tests.codec.test_codec import random_codes

MINI_OMNI = dict(SNAC_24KHZ, encoder_dim=4, encoder_rates=[2, 4], decoder_dim=32, decoder_rates=[4, 2], codebook_size=50)
ODD = dict(MINI_OMNI, encoder_rates=[2, 3], decoder_dim=16, decoder_rates=[3, 2], vq_strides=[2, 1], depthwise=False)


def package_model(config: dict[str, Any], seed: int = 0) -> SNAC:
    """The package's model with every parameter moved away from its initial value."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SNAC(**config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5 + torch.rand_like(parameter) * 1.5)
    return model.requires_grad_(False)


def pair(config: dict[str, Any]) -> tuple[SNAC, SnacCodec]:
    """The package's model, and our codec with the same weights."""
    return package_model(config), SnacCodec(package_model(config))


@pytest.fixture(params=[MINI_OMNI, ODD], ids=["mini-omni", "odd"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def noise_of(seed: int, layer: int, start: int, count: int) -> Tensor:
    """Noise `[count]` of one stream's layer, from position `start`."""
    return keyed_noise(torch.tensor([noise_key(layer, seed)]), torch.arange(start, start + count)[None])[0]


def package_decode(model: SNAC, codec: SnacCodec, codes: Tensor) -> Tensor:
    return model.decode([level[None] for level in to_levels(codes, codec.strides)])[0, 0]


# -- the order of codes --------------------------------------------------------------------------------------


def test_levels_against_a_slow_reference() -> None:
    codes = torch.arange(7 * 5).reshape(7, 5)
    levels: list[list[int]] = [[], [], []]
    for c0, c1a, c2a, c2b, c1b, c2c, c2d in codes.t().tolist():
        levels[0] += [c0]
        levels[1] += [c1a, c1b]
        levels[2] += [c2a, c2b, c2c, c2d]
    assert [level.tolist() for level in to_levels(codes)] == levels
    assert torch.equal(from_levels([torch.tensor(level) for level in levels]), codes)


@pytest.mark.parametrize("strides", [(4, 2, 1), (2, 1), (8, 4, 2, 1), (6, 2, 1), (4, 2)])
def test_levels_round_trip(strides: tuple[int, ...]) -> None:
    for frames in (0, 1, 6):
        codes = torch.randint(0, 9, (len(stream_levels(strides)), frames))
        levels = to_levels(codes, strides)
        assert [len(level) for level in levels] == [frames * strides[0] // stride for stride in strides]
        assert torch.equal(from_levels(levels, strides), codes)


def test_levels_that_do_not_fit() -> None:
    with pytest.raises(UserError, match=r"\[2, 4, 7\] are not whole frames of \[1, 2, 4\]"):
        from_levels([torch.zeros(2), torch.zeros(4), torch.zeros(7)])


# -- against the package -------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [1, 2, 9])
def test_decoding_equals_the_packages_without_noise(config: dict[str, Any], frames: int) -> None:
    model, codec = pair(config | {"noise": False})
    codes = random_codes(codec, frames)
    expected = package_decode(model, codec, codes)
    assert expected.std() > 0.01
    torch.testing.assert_close(codec.decode(codes), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_decoding_equals_the_packages_with_the_same_noise(config: dict[str, Any]) -> None:
    model, codec = pair(config)
    codes = random_codes(codec, 9)
    keys = iter([layer.number for layer in codec._decoder.layers if isinstance(layer, Noise)])

    def give_noise(block: NoiseBlock, key: int) -> None:
        def forward(x: Tensor) -> Tensor:
            return x + noise_of(5, key, 0, x.shape[-1]) * block.linear(x)

        block.forward = forward

    for module in model.modules():
        if isinstance(module, NoiseBlock):
            give_noise(module, next(keys))
    expected = package_decode(model, codec, codes)
    torch.testing.assert_close(codec.decode(codes, seed=5), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert not torch.allclose(codec.decode(codes, seed=6), expected, atol=1e-3)


def test_encoding_equals_the_packages(config: dict[str, Any]) -> None:
    model, codec = pair(config)
    audio = torch.randn(5 * codec.frame_samples + 3, generator=torch.Generator().manual_seed(0)) / 5
    levels = model.encode(audio[None, None])
    assert len(levels[0].unique()) > 1
    assert torch.equal(codec.encode(audio), from_levels([level[0] for level in levels], codec.strides))


def test_samples_are_returned_as_early_as_the_package_allows(config: dict[str, Any]) -> None:
    """A code whose vector is not a number spoils every sample that depends on it, and no other."""
    model, codec = pair(config | {"noise": False})
    for quantizer in model.quantizer.quantizers:
        quantizer.codebook.weight[0] = float("nan")
    for frames in range(1, codec.lookahead + 4):
        codes = random_codes(codec, frames + 2).clamp(min=1)
        codes[:, frames:] = 0
        spoilt = package_decode(model, codec, codes).isnan()
        assert int((~spoilt).sum()) == codec.exact_samples(frames)


def test_the_real_size() -> None:
    codec = SnacCodec.random(0)
    assert (codec.sample_rate, codec.frame_samples, codec.codebook_sizes) == (24000, 2048, (4096,) * 7)
    assert (codec.frame_rate, codec.lookahead) == (11.71875, 3)
    assert [codec.exact_samples(n) for n in range(5)] == [0, 0, 0, 1387, 3435]
    codes = random_codes(codec, 4)
    stream = codec.stream()
    parts = [stream.push(codes[:, :3]), stream.push(codes[:, 3:]), stream.finish()]
    assert [len(part) for part in parts] == [1387, 2048, 4757]
    assert torch.equal(torch.cat(parts), codec.decode(codes))


# -- the noise -----------------------------------------------------------------------------------------------


def test_noise_is_keyed_by_position_seed_and_layer() -> None:
    whole = noise_of(3, 1, 0, 1000)
    for start, count in ((0, 1), (0, 0), (17, 400), (999, 1)):
        assert torch.equal(noise_of(3, 1, start, count), whole[start : start + count])
    keys = torch.tensor([noise_key(1, seed) for seed in (3, 8)])
    both = keyed_noise(keys, torch.stack([torch.arange(1000), torch.arange(70, 1070)]))
    assert torch.equal(both[0], whole) and torch.equal(both[1], noise_of(8, 1, 70, 1000))
    for seed, layer in ((4, 1), (3, 2), (1, 3), (-3, 1), (3 + 2**64, 1)):
        other = noise_of(seed, layer, 0, 1000)
        assert abs(float(torch.corrcoef(torch.stack([whole, other]))[0, 1])) < 0.15
        assert not set(whole.tolist()) & set(other.tolist()[:20])  # nor the same numbers in another order


@pytest.mark.parametrize("start", [0, 24000 * 3600, 2**32 - 100_000])
def test_noise_is_standard_normal_and_white(start: int) -> None:
    count = 200_000
    noise = noise_of(0, 0, start, count)
    assert noise.isfinite().all() and noise.dtype == torch.float32
    tolerance = 5 / count**0.5
    assert abs(noise.mean()) < tolerance and abs(noise.square().mean() - 1) < 1.5 * tolerance
    assert abs(noise.pow(4).mean() - 3) < 10 * tolerance
    for lag in (1, 2, 3, 4, 8, 512):
        assert abs((noise[lag:] * noise[:-lag]).mean()) < tolerance
    expected = torch.distributions.Normal(0, 1).cdf(torch.tensor([-2.0, -1.0, 0.5, 2.5]))
    measured = torch.stack([(noise < edge).float().mean() for edge in (-2.0, -1.0, 0.5, 2.5)])
    torch.testing.assert_close(measured, expected, rtol=0, atol=tolerance)


def test_mix_against_unbounded_integers() -> None:
    def slow(x: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> shift)) * factor % 2**32
        return x ^ (x >> 16)

    words = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1]
    assert mix32(torch.tensor(words)).tolist() == [slow(word) for word in words]


# -- folders and configurations ------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "config.json").write_text(json.dumps(MINI_OMNI))
    torch.save(package_model(MINI_OMNI).state_dict(), tmp_path / "pytorch_model.bin")
    yield tmp_path


def test_reading_a_folder(folder: Path) -> None:
    expected = SnacCodec(package_model(MINI_OMNI))
    codes = random_codes(expected, 5)
    codec = load_codec("snac", folder)
    assert torch.equal(codec.decode(codes), expected.decode(codes))
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "pytorch_model.bin").unlink()
    assert torch.equal(load_codec("snac", str(folder)).decode(codes), expected.decode(codes))


def test_folders_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    weights, config = folder / "pytorch_model.bin", folder / "config.json"
    whole = weights.read_bytes()

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match) as refusal:
            load_codec("snac", folder)
        assert "\n" not in str(refusal.value)

    weights.write_bytes(whole[: len(whole) // 2])
    refused(r"pytorch_model\.bin is truncated")
    weights.write_bytes(b"")
    refused(r"pytorch_model\.bin is truncated")
    weights.write_bytes(pickle.dumps(Malicious(), protocol=2))
    refused("a pickle with more than tensors in it")
    assert not (folder / "opened").exists()
    torch.save(package_model(ODD).state_dict(), weights)
    refused(r"do not fit its config\.json")
    config.write_text("{")
    refused(r"config\.json cannot be read")
