"""Laws of the codec contract, for every codec: streamed equals whole, repeatable, undisturbed, early."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.codec.mimi import MimiCodec
from omni.codec.registry import CODECS, load_codec, load_if_given, register_codec
from omni.codec.snac import SnacCodec
from omni.errors import UserError
from tests.codec.mimi_toys import PLAIN

# Small SNACs: mini-omni's strides, noise, depthwise convolutions; and odd rates, two levels, dense, no noise.
SNAC_A = dict(encoder_dim=4, encoder_rates=[2, 4], decoder_dim=32, decoder_rates=[4, 2], codebook_size=50, vq_strides=[4, 2, 1])
SNAC_B = dict(
    encoder_dim=4,
    encoder_rates=[2, 3],
    decoder_dim=16,
    decoder_rates=[3, 2],
    codebook_size=20,
    vq_strides=[2, 1],
    depthwise=False,
    noise=False,
)


@pytest.fixture(scope="module", params=["codec2", "snac_a", "snac_b", "mimi"])
def codec(request: pytest.FixtureRequest) -> AudioCodec:
    if request.param == "codec2":
        return load_codec("codec2")
    if request.param == "mimi":
        return MimiCodec.random(1, **PLAIN)
    return SnacCodec.random(1, **(SNAC_A if request.param == "snac_a" else SNAC_B))


def random_codes(codec: AudioCodec, frames: int, seed: int = 0) -> Tensor:
    """In-range codes [K, F]; every other frame of Codec2 is unvoiced, so that its noise is heard."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.stack([torch.randint(0, size, (frames,), generator=generator) for size in codec.codebook_sizes])
    if codec.name == "codec2":
        codes[3, ::2] = 0
    return codes


def pieces(codes: Tensor, seed: int) -> list[Tensor]:
    """A random split of [K, F], empty pieces included."""
    rng = random.Random(seed)
    cuts = sorted(rng.choices(range(codes.shape[1] + 1), k=rng.randint(0, 8)))
    return [codes[:, a:b] for a, b in zip([0, *cuts], [*cuts, codes.shape[1]], strict=True)]


# -- law 7 ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(40)
@pytest.mark.parametrize("frames", [1, 2, 3, 17])
@pytest.mark.parametrize("split", range(5))
def test_streamed_equals_whole(codec: AudioCodec, frames: int, split: int) -> None:
    codes = random_codes(codec, frames, seed=frames)
    stream = codec.stream()
    streamed = [stream.push(piece) for piece in pieces(codes, split)] + [stream.finish()]
    whole = codec.decode(codes)
    assert whole.dtype == torch.float32 and whole.shape == (frames * codec.frame_samples,)
    assert torch.equal(torch.cat(streamed), whole)
    assert whole.isfinite().all() and whole.abs().max() <= 1 and whole.std() > 0


@pytest.mark.parametrize("make", [lambda seed: SnacCodec.random(seed, **SNAC_A), lambda seed: MimiCodec.random(seed, **PLAIN)])
def test_random_codecs_repeat_and_leave_the_global_state_alone(make: Any) -> None:
    state = torch.random.get_rng_state()
    one, same, other = make(1), make(1), make(2)
    assert torch.equal(torch.random.get_rng_state(), state)
    codes = random_codes(one, 4)
    assert torch.equal(one.decode(codes), same.decode(codes))
    assert not torch.equal(one.decode(codes), other.decode(codes))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_seed_keys_the_noise(codec: AudioCodec) -> None:
    codes = random_codes(codec, 12)
    same = torch.equal(codec.decode(codes, seed=0), codec.decode(codes, seed=1))
    without_noise = codec.name == "mimi" or (codec.name == "snac" and len(codec.codebook_sizes) == 3)
    assert same == without_noise


@pytest.mark.sampled(2)
def test_interleaved_streams_do_not_disturb_each_other(codec: AudioCodec) -> None:
    rng = random.Random(0)
    lines = [random_codes(codec, 15, seed=n) for n in range(3)]
    streams = [codec.stream(seed=n) for n in range(3)]
    heard: list[list[Tensor]] = [[], [], []]
    waiting = [pieces(codes, seed=n) for n, codes in enumerate(lines)]
    while any(waiting):
        n = rng.choice([n for n in range(3) if waiting[n]])
        heard[n].append(streams[n].push(waiting[n].pop(0)))
    for n in range(3):
        heard[n].append(streams[n].finish())
        assert torch.equal(torch.cat(heard[n]), codec.decode(lines[n], seed=n))


@pytest.mark.sampled(1)
def test_threads_do_not_disturb_each_other(codec: AudioCodec) -> None:
    lines = [random_codes(codec, 30, seed=n) for n in range(3)]
    alone = [codec.decode(codes) for codes in lines]
    together: dict[int, Tensor] = {}

    def decode(n: int) -> None:
        stream = codec.stream()
        parts = [stream.push(piece) for piece in lines[n].split(1, dim=1)]
        together[n] = torch.cat([*parts, stream.finish()])

    threads = [threading.Thread(target=decode, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(together[n], alone[n]) for n in range(3))


# -- as early as possible, and no earlier --------------------------------------------------------------------


def test_pushes_return_every_exact_sample(codec: AudioCodec) -> None:
    stream, total = codec.stream(), 0
    for n, frame in enumerate(random_codes(codec, 12).split(1, dim=1), start=1):
        total += stream.push(frame).numel()
        assert total == codec.exact_samples(n)
    assert total + stream.finish().numel() == 12 * codec.frame_samples


def test_a_frame_depends_on_nothing_beyond_its_lookahead(codec: AudioCodec) -> None:
    size, frame, frames = codec.frame_samples, 4, codec.lookahead + 10
    codes, changed = random_codes(codec, frames), random_codes(codec, frames, seed=1)
    changed[:, : frame + codec.lookahead + 1] = codes[:, : frame + codec.lookahead + 1]
    whole, other = codec.decode(codes), codec.decode(changed)
    assert torch.equal(other[: (frame + 1) * size], whole[: (frame + 1) * size])
    assert not torch.equal(other, whole)
    # And the lookahead is what the stream waits for, no more.
    assert codec.exact_samples(frame + codec.lookahead) < (frame + 1) * size
    assert codec.exact_samples(frame + codec.lookahead + 1) >= (frame + 1) * size


# -- the caller's surroundings -------------------------------------------------------------------------------


def test_precision_of_the_callers_model_does_not_matter(codec: AudioCodec) -> None:
    """Inside Fabric's mixed and true half precision: autocast, another default dtype."""
    codes = random_codes(codec, 8)
    whole = codec.decode(codes)
    audio = torch.randn(4 * codec.frame_samples, generator=torch.Generator().manual_seed(0)) / 10
    encoded = codec.encode(audio)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(codec.decode(codes), whole)
            assert torch.equal(codec.encode(audio), encoded)
            assert codec.decode(codes[:, :0]).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_int32_codes_and_other_layouts_of_memory(codec: AudioCodec) -> None:
    codes = random_codes(codec, 6)
    assert torch.equal(codec.decode(codes.t().contiguous().t().to(torch.int32)), codec.decode(codes))


def test_encode(codec: AudioCodec) -> None:
    generator = torch.Generator().manual_seed(0)
    for samples in (1, codec.frame_samples, 5 * codec.frame_samples + 1):
        audio = torch.randn(samples, generator=generator) / 10
        codes = codec.encode(audio, codec.sample_rate)
        assert codes.shape == (len(codec.codebook_sizes), codec.frames(samples)) and codes.dtype == torch.long
        assert torch.equal(codec.check(codes), codes)  # in range
        assert torch.equal(codec.encode(audio.double()), codes)  # repeatable
    assert codec.frames(codec.frame_samples) == 1 and codec.frames(codec.frame_samples + 1) == 2
    assert codec.encode(audio[:0]).shape == (len(codec.codebook_sizes), 0)


# -- bad input -----------------------------------------------------------------------------------------------


def test_codes_out_of_range_name_value_stream_and_frame(codec: AudioCodec) -> None:
    stream = codec.stream()
    codes = random_codes(codec, 7)
    heard = [stream.push(codes[:, :4])]
    bad = codes[:, 4:].clone()
    size = codec.codebook_sizes[1]
    bad[1, 2] = size
    with pytest.raises(UserError, match=rf"code {size} in stream 1, frame 6 .* 0 to {size - 1}"):
        stream.push(bad)
    bad[0, 1] = -1
    with pytest.raises(UserError, match=r"code -1 in stream 0, frame 5 "):
        stream.push(bad)
    # A refused push took nothing: the stream goes on as if it had not been.
    heard += [stream.push(codes[:, 4:]), stream.finish()]
    assert torch.equal(torch.cat(heard), codec.decode(codes))


def test_a_finished_stream_takes_no_more(codec: AudioCodec) -> None:
    stream = codec.stream()
    stream.push(random_codes(codec, 5))
    stream.finish()
    assert stream.finish().shape == (0,)
    with pytest.raises(UserError, match="finished"):
        stream.push(random_codes(codec, 1))


# -- the registry --------------------------------------------------------------------------------------------


def test_registry(tmp_path) -> None:
    assert {"codec2", "snac"} <= set(CODECS)
    with pytest.raises(UserError, match=r"'codec3' is unknown; did you mean 'codec2'\? .*snac"):
        load_codec("codec3")
    with pytest.raises(UserError, match="codec2 has no weights"):
        load_codec("codec2", tmp_path)
    with pytest.raises(UserError, match="needs a folder"):
        load_codec("snac")


def test_register_adds_a_codec(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setitem(CODECS, "mine", None)  # and away again after the test
    asked = []
    made = SnacCodec.random(0, **SNAC_B)

    def load(folder, device):
        asked.append((folder, device))
        return made

    known = dict(sample_rate=24000, frame_rate=made.frame_rate, codebook_sizes=made.codebook_sizes)
    assert register_codec("mine", **known, weights="weights of mine")(load) is load
    assert load_codec("mine", str(tmp_path), "cpu") is made
    assert asked == [(tmp_path, torch.device("cpu"))]
    assert CODECS.find("mine").frame_rate == made.frame_rate
    assert load_if_given("mine", None) is None
    register_codec("mine", **known)(load)  # without weights
    made.name = "mine"
    assert load_if_given("mine", None) is made and asked[-1] == (None, torch.device("cpu"))
    with pytest.raises(UserError, match=r"mine\b.*no weights"):
        load_codec("mine", tmp_path)


@pytest.mark.long
def test_what_is_known_of_a_codec_is_what_it_is() -> None:
    """Without its weights: rates, sizes, and the orders of a frame's codes."""
    for name in sorted(CODECS.keys() - {"none"}):
        spec = CODECS.find(name)
        made = spec.load(None, torch.device("cpu")) if spec.random else load_codec(name)
        assert (spec.sample_rate, spec.frame_rate) == (made.sample_rate, made.frame_rate)
        assert spec.codebook_sizes == tuple(made.codebook_sizes) and bool(spec.weights) == spec.random
        assert all(sorted(order) == list(range(len(spec.codebook_sizes))) for order in spec.orders.values())


def test_codes_are_looked_at_where_they_are(codec: AudioCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec on a device that cannot be asked (as one that is busy should not be): only the codes' own is."""
    monkeypatch.setattr(codec, "device", torch.device("meta"))
    codes = torch.zeros(len(codec.codebook_sizes), 3, dtype=torch.int32)
    checked = codec.check(codes)
    assert checked.is_meta and checked.dtype == torch.long and checked.shape == codes.shape
    codes[1, 2] = -1
    with pytest.raises(UserError, match="code -1 in stream 1, frame 2"):
        codec.check(codes)
