"""An encoder that hears a sound while it comes: any split into pieces gives the frames of the whole."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omni.encoder.base import Encoder, build_encoder, collate
from omni.encoder.whisper import WhisperEncoder, WhisperStream
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from tests.close import assert_near
from tests.encoder.test_contract import sound
from tests.encoder.test_whisper import whisper_of

SMALL = WhisperConfig(width=32, heads=2, layers=2, window_seconds=3.0, mode="chunked", long_audio="split")
CONFIGS = {
    "320 ms": SMALL,
    "a history": replace(SMALL, chunk_ms=160, history_ms=400),
    "frames": replace(SMALL, chunk_ms=20, history_ms=20, n_mels=128),
    "coarse": replace(SMALL, hop=320, window_seconds=4.0, chunk_ms=640, layers=3),
}
# Less than a hop, around one and around a chunk, odd and even numbers of feature frames, a window and more of them.
SAMPLES = (1, 159, 160, 161, 480, 5120, 5121, 5279, 5280, 24123, 48000, 48001, 48160, 100_000)


def listen(encoder: Encoder, audio: Tensor, sizes: list[int]) -> list[Tensor]:
    stream = encoder.stream()
    return [*(stream.push(piece) for piece in audio.split(sizes)), stream.finish()]


def drawn(samples: int, most: int, seed: int) -> list[int]:
    """Sizes of pieces, some of them empty."""
    draw, sizes = random.Random(seed), list[int]()
    while sum(sizes) < samples:
        sizes.append(min(draw.randrange(most), samples - sum(sizes)))
    return sizes


@pytest.mark.sampled(4)
@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("name", CONFIGS)
def test_any_split_equals_the_whole(name: str, samples: int) -> None:
    torch.manual_seed(0)
    encoder = build_encoder(CONFIGS[name]).eval()
    assert isinstance(encoder, WhisperEncoder)
    audio = sound(samples)
    whole, counts = encoder.encode([audio])
    assert counts == [encoder.config.frames(samples)]
    once = torch.cat(listen(encoder, audio, [samples]))
    assert_near(once, whole, 1e-5, what=f"{samples} samples")
    for most in (300, 20_000):
        assert torch.cat(listen(encoder, audio, drawn(samples, most, samples))).equal(once)


def test_a_history_bounds_the_memory() -> None:
    stream = build_encoder(CONFIGS["a history"]).eval().stream()
    assert isinstance(stream, WhisperStream)
    for piece in sound(46_000).split(500):  # within one clip: another one begins with empty memory
        stream.push(piece)
    for heard in stream.heard:
        assert heard.shape[3] == 20 + 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_whole_clips_are_heard_alike_in_any_company(name: str) -> None:
    torch.manual_seed(0)
    encoder = build_encoder(CONFIGS[name]).eval()
    clips = [sound(samples, samples) for samples in SAMPLES]
    together, counts = encoder.encode(clips)
    for clip, frames in zip(clips, together.split(counts), strict=True):
        assert_near(frames, encoder.encode([clip])[0], 1e-5)


def test_frames_come_when_their_chunk_is_there_and_nothing_looks_ahead() -> None:
    torch.manual_seed(0)
    encoder = build_encoder(SMALL).eval()
    assert encoder.config.chunk_samples == 5120
    heard = listen(encoder, sound(12_000), [5119, 1, 5119, 1, 1760])
    assert [len(frames) for frames in heard] == [0, 16, 0, 16, 0, 6]
    audio, other = sound(12_000), sound(12_000)
    other[10_240:] = 0
    assert encoder.encode([audio])[0][:32].equal(encoder.encode([other])[0][:32])
    other[5_119] += 0.1  # the last sample of the first chunk
    found, wanted = encoder.encode([other])[0], encoder.encode([audio])[0]
    assert all(not one.equal(two) for one, two in zip(found[:16], wanted[:16], strict=True))


def test_a_clip_heard_whole_equals_whispers_modules_ten_milliseconds_later() -> None:
    """The convolutions see one frame less of what follows, which is Whisper on a sound that begins one frame later."""
    torch.manual_seed(0)
    encoder = build_encoder(replace(SMALL, chunk_ms=0)).eval()
    assert isinstance(encoder, WhisperEncoder) and encoder.config.chunk_samples is None
    theirs = whisper_of(encoder)
    audio = sound(20_000)
    late = F.pad(SMALL.features(audio)[None], (1, 0))
    x = F.gelu(theirs.conv2(F.gelu(theirs.conv1(late))[..., :-1])).transpose(1, 2)
    x = x + theirs.positional_embedding[: x.shape[1]]
    for block in theirs.blocks:
        x = block(x)
    assert_near(encoder.encode([audio])[0], theirs.ln_post(x)[0], 1e-5)


def test_training_draws_chunks_by_the_batch_and_some_batches_are_heard_whole() -> None:
    torch.manual_seed(0)
    encoder = build_encoder(SMALL).train()
    assert isinstance(encoder, WhisperEncoder)
    drawn = [encoder._chunks([100 + n, 90]) for n in range(400)]
    assert drawn == [encoder._chunks([100 + n, 90]) for n in range(400)]
    sizes = sorted(chunks.size for chunks in drawn if chunks is not None)
    assert sizes[0] == 8 and sizes[-1] == 64 and len(set(sizes)) > 15  # 160 to 1280 ms
    assert 70 < drawn.count(None) < 130
    assert sizes[len(sizes) // 2] in range(19, 27)  # the middle of a logarithmic scale: 453 ms
    encoder.eval()
    assert encoder._chunks([100]) == encoder._chunks([1]) and encoder._chunks([1]).size == 16  # type: ignore[union-attr]


@pytest.mark.parametrize("ratio", [1.0, 100.0])
def test_gradients_are_those_of_each_clip_alone(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With padded groups, too, where rows of no frame hear nothing."""
    monkeypatch.setattr("omni.encoder.whisper.EQUAL_LENGTHS", ratio)
    torch.manual_seed(0)
    config = CONFIGS["a history"]
    encoder = build_encoder(config).eval()
    clips = [sound(n, n) for n in (700, 16_000, 31_000)]
    mels, lengths = collate([config.features(clip) for clip in clips])
    encoder(mels, lengths, [config.frames(len(clip)) for clip in clips]).sin().sum().backward()
    found = {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}
    encoder.zero_grad()
    for clip in clips:
        features = config.features(clip)
        encoder(features[None], [features.shape[1]], [config.frames(len(clip))]).sin().sum().backward()
    for name, p in encoder.named_parameters():
        if p.grad is not None:
            assert_near(found[name], p.grad, 1e-5, what=name)


def test_a_stream_refuses_what_the_encoder_cannot_take_and_goes_on() -> None:
    encoder = build_encoder(replace(SMALL, long_audio="refuse")).eval()
    stream, audio = encoder.stream(), sound(48_000)
    assert isinstance(stream, WhisperStream)
    first = stream.push(audio[:40_000])
    with pytest.raises(UserError, match="lasts 3.1 s and the encoder takes 3 s"):
        stream.push(audio[:10_000])
    with pytest.raises(UserError, match=r"shape \[2, 5\]"):
        stream.push(torch.zeros(2, 5))
    rest = stream.push(audio[40_000:])
    assert_near(torch.cat([first, rest, stream.finish()]), encoder.encode([audio])[0], 1e-5)
    with pytest.raises(UserError, match="no samples"):
        stream.finish()
    assert_near(torch.cat([stream.push(audio[:9000]), stream.finish()]), encoder.encode([audio[:9000]])[0], 1e-5)
