"""Mimi: parity with transformers' MimiModel, exact streams, and reading folders."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MimiConfig as ReferenceConfig
from transformers import MimiModel

from omni.audio.codec import load_codec
from omni.audio.mimi import ENCODE_FRAMES, MimiCodec
from omni.audio.mimi_config import MimiConfig, read_config
from omni.audio.mimi_steps import run
from omni.errors import UserError
from omni.layout import Layout

# kyutai/mimi made small, and one with everything that it leaves out. Windows of 5 and 4 frames.
PLAIN: dict[str, Any] = dict(
    hidden_size=32,
    num_filters=4,
    upsampling_ratios=[3, 2],
    codebook_size=16,
    codebook_dim=8,
    vector_quantization_hidden_dimension=8,
    num_quantizers=16,
    upsample_groups=32,
    num_hidden_layers=2,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=4,
    sliding_window=10,
)
ODD: dict[str, Any] = PLAIN | dict(
    frame_rate=1000.0,  # of 4000 positions/s: four make a frame
    sampling_rate=16000,
    upsampling_ratios=[2, 2],
    num_residual_layers=2,
    use_conv_shortcut=True,
    pad_mode="replicate",
    codebook_dim=32,
    vector_quantization_hidden_dimension=32,  # as large as hidden_size: no projections
    num_quantizers=9,
    num_semantic_quantizers=2,
    upsample_groups=8,
    num_key_value_heads=2,
    head_dim=6,
    attention_bias=True,
    rope_parameters={"rope_type": "default", "rope_theta": 50.0},
    sliding_window=15,
    kernel_size=5,
    last_kernel_size=5,
)


class Pair(NamedTuple):
    """Folder of random weights, transformers' model of it, and our codec of it."""

    folder: Path
    model: MimiModel
    codec: MimiCodec


def save(config: dict[str, Any], folder: Path, gain: float = 0.02) -> None:
    """A folder in the original's format whose every tensor matters; `gain` scales the sound."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = MimiModel(ReferenceConfig(**config))
        for name, tensor in model.named_parameters():
            if name.endswith(".scale"):
                tensor.uniform_(0.3, 1.0)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.1)
        for name, tensor in model.named_buffers():
            if name.endswith("embed_sum"):
                tensor.normal_()[3] *= 1e-5
            elif name.endswith("cluster_usage"):
                tensor.uniform_(0.5, 2.0)
                tensor[3] = 0  # a code that training never used: divided by 1e-5
        model.decoder.decoder_seanet.layers[-1].conv.weight.mul_(gain)
        model.encoder.downsample.conv.weight.mul_(0.1)  # latents of the size of the codebooks' entries
        model.save_pretrained(folder)


def change(folder: Path, rule: Any) -> None:
    """Rewrites the folder's tensors: `rule(name, tensor)` gives the new one, None to leave it out."""
    path = folder / "model.safetensors"
    tensors = {name: rule(name, tensor) for name, tensor in load_file(path).items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


@pytest.fixture(scope="module", params=["plain", "odd"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    save(*{"plain": (PLAIN, folder, 0.02), "odd": (ODD, folder, 0.01)}[request.param])
    return Pair(folder, MimiModel.from_pretrained(folder).eval(), MimiCodec.from_folder(folder))


def random_codes(codec: MimiCodec, frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, codec.codebook_sizes[0], (len(codec.codebook_sizes), frames), generator=generator)


def random_sound(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed)) / 3


@torch.no_grad()
def reference_decode(model: MimiModel, codes: Tensor) -> Tensor:
    return model.decode(codes[None]).audio_values[0, 0]


@torch.no_grad()
def reference_encode(model: MimiModel, audio: Tensor, codebooks: int) -> Tensor:
    return model.encode(audio[None, None], num_quantizers=codebooks).audio_codes[0]


# -- against transformers ------------------------------------------------------------------------------------


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
    for codebooks in (pair.codec.config.num_semantic_quantizers - 1, most + 1):
        with pytest.raises(UserError, match=f"mimi with {codebooks} codebooks: this model has {most}"):
            MimiCodec.from_folder(pair.folder, codebooks=codebooks)


def test_sound_beyond_full_scale_is_cut_off(tmp_path: Path) -> None:
    save(PLAIN, tmp_path, gain=2.0)
    codec = MimiCodec.from_folder(tmp_path)
    codes = random_codes(codec, 10)
    expected = reference_decode(MimiModel.from_pretrained(tmp_path).eval(), codes)
    assert expected.max() > 2 and expected.min() < -2
    torch.testing.assert_close(codec.decode(codes), expected.clamp(-1, 1), rtol=0, atol=1e-4)


# -- streams -------------------------------------------------------------------------------------------------


def pieces(codes: Tensor, seed: int) -> list[Tensor]:
    """A random split of [K, F], empty pieces included."""
    rng = random.Random(seed)
    cuts = sorted(rng.choices(range(codes.shape[1] + 1), k=rng.randint(0, 8)))
    return [codes[:, a:b] for a, b in zip([0, *cuts], [*cuts, codes.shape[1]], strict=True)]


@pytest.mark.parametrize("frames", [1, 3, 40])
def test_streamed_equals_whole(pair: Pair, frames: int) -> None:
    codes = random_codes(pair.codec, frames)
    whole = pair.codec.decode(codes)
    splits = [list(codes.split(1, dim=1)), list(codes.split(7, dim=1)), *(pieces(codes, seed) for seed in range(2))]
    for split in splits:
        stream, count, heard = pair.codec.stream(), 0, []
        for piece in split:
            heard.append(stream.push(piece))
            count += piece.shape[1]
            assert heard[-1].shape == (piece.shape[1] * pair.codec.frame_samples,)  # everything, at once
            assert sum(map(len, heard)) == pair.codec.exact_samples(count)
        assert stream.finish().shape == (0,)
        assert torch.equal(torch.cat(heard), whole)


def test_interleaved_streams_do_not_disturb_each_other(pair: Pair) -> None:
    lines = [random_codes(pair.codec, 15, seed=n) for n in range(3)]
    waiting = [pieces(codes, seed=n) for n, codes in enumerate(lines)]
    streams = [pair.codec.stream() for _ in lines]
    heard: list[list[Tensor]] = [[] for _ in lines]
    rng = random.Random(0)
    while any(waiting):
        n = rng.choice([n for n in range(3) if waiting[n]])
        heard[n].append(streams[n].push(waiting[n].pop(0)))
    for line, parts in zip(lines, heard, strict=True):
        assert torch.equal(torch.cat(parts), pair.codec.decode(line))


def test_nothing_is_looked_ahead_for(pair: Pair) -> None:
    codes, size = random_codes(pair.codec, 12), pair.codec.frame_samples
    changed = codes.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 16
    one, other = pair.codec.decode(codes), pair.codec.decode(changed)
    assert pair.codec.lookahead == 0
    assert torch.equal(one[: 6 * size], other[: 6 * size])
    assert not torch.equal(one[6 * size : 7 * size], other[6 * size : 7 * size])


def test_what_a_stream_keeps_does_not_grow(pair: Pair) -> None:
    stream, kept = pair.codec.stream(), []
    for frames in (1, 40):
        stream.push(random_codes(pair.codec, frames))
        kept.append(len(pickle.dumps(vars(stream)["_steps"])))  # whole storages: views count for all they keep alive
    assert kept[1] - kept[0] < 64  # digits of the position


def test_the_callers_precision_does_not_matter(pair: Pair) -> None:
    codes, audio = random_codes(pair.codec, 8), random_sound(100)
    decoded, encoded = pair.codec.decode(codes), pair.codec.encode(audio)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            codec = MimiCodec.from_folder(pair.folder)
            assert torch.equal(codec.decode(codes), decoded) and torch.equal(codec.encode(audio), encoded)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("config", [PLAIN, ODD], ids=["plain", "odd"])
def test_nothing_is_left_on_another_device(config: dict[str, Any], tmp_path: Path) -> None:
    """On the meta device every mixture of devices is an error, as it would be on a GPU."""
    save(config, tmp_path)
    codec = MimiCodec.from_folder(tmp_path, "meta")
    steps = [layer.step() for layer in codec._decoder]
    for _ in range(3):
        sound = run(steps, codec._quantizer.decode(torch.zeros(8, 1, dtype=torch.long, device="meta")))
        assert sound.shape == (codec.frame_samples, 1) and sound.device.type == "meta"
    codes = codec._encode(torch.zeros(3 * codec.frame_samples, device="meta"))
    assert codec.device.type == "meta" and codes.shape == (8, 3) and codes.device.type == "meta"


def test_the_real_size() -> None:
    codec = MimiCodec.random(0, num_hidden_layers=1, intermediate_size=64, num_quantizers=10)
    assert (codec.name, codec.sample_rate, codec.frame_samples, codec.frame_rate) == ("mimi", 24000, 1920, 12.5)
    assert codec.codebook_sizes == (2048,) * 8 and codec.deterministic
    sound = codec.decode(random_codes(codec, 2))
    assert sound.shape == (3840,) and sound.std() > 0.01
    assert torch.equal(codec.decode(codec.encode(sound)), codec.decode(codec.encode(sound), seed=1))
    assert Layout.build(codec.codebook_sizes, 32000).codebook_sizes == codec.codebook_sizes


def test_random_codecs_repeat_and_leave_the_global_state_alone() -> None:
    state = torch.random.get_rng_state()
    sizes: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in PLAIN.items()}
    one, same, other = (MimiCodec.random(seed, **sizes) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    codes = random_codes(one, 4)
    assert torch.equal(one.decode(codes), same.decode(codes))
    assert not torch.equal(one.decode(codes), other.decode(codes))


# -- folders -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(PLAIN, tmp_path)
    return tmp_path


def test_loading_by_name(folder: Path) -> None:
    expected = MimiCodec.from_folder(folder, codebooks=16)
    codes = random_codes(expected, 5)
    codec = load_codec("mimi-16", str(folder))
    assert codec.name == "mimi-16" and torch.equal(codec.decode(codes), expected.decode(codes))
    assert load_codec("mimi", folder).codebook_sizes == (16,) * 8
    with pytest.raises(UserError, match="mimi with 32 codebooks: this model has 16; ask for 1 to 16"):
        load_codec("mimi-32", folder)
    with pytest.raises(UserError, match="mimi needs a folder"):
        load_codec("mimi")


def test_the_released_form_of_the_config(folder: Path) -> None:
    """kyutai/mimi itself was written by an older transformers: rope_theta and frame_rate stand on their own."""
    expected = MimiCodec.from_folder(folder)
    edit(folder, rope_parameters=None, _frame_rate=None, rope_theta=10000.0, frame_rate=2000.0)
    codec = MimiCodec.from_folder(folder)
    codes = random_codes(codec, 5)
    assert torch.equal(codec.decode(codes), expected.decode(codes))
    edit(folder, rope_theta=50.0)
    assert not torch.equal(MimiCodec.from_folder(folder).decode(codes), expected.decode(codes))
    (folder / "config.json").write_text('{"model_type": "mimi"}')
    assert read_config(folder / "config.json") == MimiConfig()
    assert MimiConfig().frame_samples == ReferenceConfig().frame_size == 1920


def test_weights_stored_in_half_precision(folder: Path) -> None:
    change(folder, lambda name, tensor: tensor.bfloat16())
    half = MimiCodec.from_folder(folder)
    change(folder, lambda name, tensor: tensor.float())
    codes = random_codes(half, 5)
    assert torch.equal(half.decode(codes), MimiCodec.from_folder(folder).decode(codes))


def edit(folder: Path, **entries: Any) -> None:
    """Changes entries of the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def refused(folder: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as refusal:
        load_codec("mimi", folder)
    assert "\n" not in str(refusal.value)


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("opened", "w"))


def test_weights_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:20], b"", pickle.dumps(Malicious(), protocol=2)):
        weights.write_bytes(damaged)
        refused(folder, r"model\.safetensors is truncated or no safetensors file")
    weights.unlink()
    torch.save(Malicious(), folder / "pytorch_model.bin")
    refused(folder, r"no weights in .* reads model\.safetensors only \(no pickles\)")
    assert not (folder / "opened").exists()


def test_tensors_that_do_not_fit(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()

    def changed(rule: Any, match: str) -> None:
        (folder / "model.safetensors").write_bytes(whole)
        change(folder, rule)
        refused(folder, match)

    wanted = "decoder_transformer.layers.1.mlp.fc2.weight"
    changed(lambda name, t: None if name == wanted else t, f"has no tensor {wanted}, which its config.json")
    changed(lambda name, t: t[:, 1:].clone() if name == wanted else t, rf"{wanted} in .* \[32, 47\], .* \[32, 48\]")
    changed(lambda name, t: t.int() if name == wanted else t, rf"{wanted} in .* is torch\.int32 \[32, 48\]")
    (folder / "model.safetensors").write_bytes(whole)
    edit(folder, num_hidden_layers=1)
    refused(folder, r"has a tensor decoder_transformer\.layers\.1\.\S+ that its config\.json does not ask for")


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"model_type": "encodec"}, "model_type is 'encodec', and the codec mimi needs 'mimi'"),
        ({"use_causal_conv": False}, "use_causal_conv is False, .* cannot be streamed"),
        ({"trim_right_ratio": 0.5}, "trim_right_ratio is 0.5, .* cannot be streamed"),
        ({"audio_channels": 2}, "audio_channels is 2, .* mono"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"pad_mode": "reflect"}, "pad_mode 'reflect' cannot be streamed"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "it needs rope_type 'default'"),
        ({"hidden_size": "32"}, "hidden_size is '32', not a whole number above 0"),
        ({"sliding_window": 0}, "sliding_window is 0, not a whole number above 0"),
        ({"norm_eps": None}, "norm_eps is None, not a number above 0"),
        ({"attention_bias": 1}, "attention_bias is 1, not true or false"),
        ({"upsampling_ratios": [3, -2]}, r"upsampling_ratios is \(3, -2\), not a list of whole numbers"),
        ({"upsample_groups": 5}, "hidden_size 32 must be a multiple of upsample_groups 5"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"codebook_dim": 4}, "codebook_dim 4 must be vector_quantization_hidden_dimension, 8"),
        ({"num_semantic_quantizers": 16}, "num_quantizers 16 must exceed num_semantic_quantizers 16"),
        ({"frame_rate": 4000}, "frame_rate 4000 must be at most half"),
    ],
)
def test_configurations_that_do_not_fit(folder: Path, entries: dict[str, Any], match: str) -> None:
    edit(folder, **entries)
    refused(folder, rf"config\.json: .*{match}")


def test_configs_that_cannot_be_read(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text("{")
    refused(folder, "not JSON")
    config.write_text("[]")
    refused(folder, "no JSON object")
    config.write_text("{}")
    refused(folder, "has no model_type")
    config.unlink()
    refused(folder, "no Mimi config")


def test_codes_out_of_range(pair: Pair) -> None:
    stream, codes = pair.codec.stream(), random_codes(pair.codec, 6)
    heard = [stream.push(codes[:, :4])]
    bad = codes[:, 4:].clone()
    bad[2, 1] = 16
    with pytest.raises(UserError, match=r"code 16 in stream 2, frame 5 is not in mimi's 0 to 15"):
        stream.push(bad)
    heard.append(stream.push(codes[:, 4:]))  # what was refused was not taken
    assert torch.equal(torch.cat(heard), pair.codec.decode(codes))
    with pytest.raises(UserError, match=r"\[8 streams, frames\], not \[9, 2\]"):
        pair.codec.decode(torch.zeros(9, 2, dtype=torch.long))
    stream.finish()
    with pytest.raises(UserError, match="finished"):
        stream.push(codes)
