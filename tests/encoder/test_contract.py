"""The encoder's contract, for Whisper and for an encoder from outside: pieces equal the whole, company changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from omni.config import ModelConfig, from_dict, preset, to_dict
from omni.encoder.base import Encoder, build_encoder, register_encoder
from omni.encoder.config import ENCODERS, EncoderConfig
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError

WHISPER = WhisperConfig(width=32, heads=2, layers=2, window_seconds=1.0)


@dataclass(frozen=True)
class PoolConfig(EncoderConfig):
    """Means of 20 ms of sound, through one linear layer."""

    kind: ClassVar[str] = "pool"
    width: int = 8
    long_audio: str = "split"  # type: ignore[assignment]
    bands, frames_per_second, max_samples = 320, 50, 16000

    def features(self, audio: Tensor) -> Tensor:
        padded = nn.functional.pad(audio, (0, -len(audio) % 320))
        return padded.view(-1, 320).T.contiguous()

    def clip_frames(self, samples: int) -> int:
        return -(-samples // 320)

    def feature_frames(self, frames: int) -> int:
        return frames

    def frames_of(self, features: int) -> int:
        return features


class Pool(Encoder):
    def __init__(self, config: PoolConfig) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(320, config.width)

    def forward(self, features: Tensor, lengths: Sequence[int], frames: Sequence[int]) -> Tensor:
        return self.linear(torch.cat([clip[:, :n].T for clip, n in zip(features, lengths, strict=True)]))


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setitem(ENCODERS, "pool", None)
        register_encoder(PoolConfig)(Pool)
        yield


CONFIGS = [
    WHISPER,
    replace(WHISPER, mode="padded"),
    replace(WHISPER, mel_floor="fixed", long_audio="split"),
    replace(WHISPER, normalize="clip", hop=320),
    PoolConfig(),
]
NAMES = ["whisper", "padded", "split", "normalised", "own"]


def make(config: EncoderConfig) -> Encoder:
    torch.manual_seed(0)
    return build_encoder(config).eval()


def sound(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed)) * 0.1


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("cuts", [(), (1,), (400, 401), (0, 5000, 5000), tuple(range(160, 14000, 160))])
def test_pieces_equal_the_whole(config: EncoderConfig, cuts: tuple[int, ...]) -> None:
    encoder, whole = make(config), sound(14321)
    stream = encoder.stream()
    pieces = [stream.push(piece) for piece in whole.tensor_split(list(cuts))]
    found, (wanted, counts) = torch.cat([*pieces, stream.finish()]), encoder.encode([whole])
    assert torch.equal(found, wanted) and len(wanted) == sum(counts) == config.frames(14321)
    again = encoder.stream()  # a stream that has finished left nothing behind
    again.push(whole[:999])
    assert torch.equal(again.finish(), encoder.encode([whole[:999]])[0])


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_frames_are_as_counted_and_company_changes_nothing(config: EncoderConfig) -> None:
    encoder, sounds = make(config), [sound(n, n) for n in (1, 319, 320, 321, 1600, config.max_samples)]
    together, counts = encoder.encode(sounds)
    assert together.shape == (sum(counts), config.width) and counts == [config.frames(len(one)) for one in sounds]
    for one, found in zip(sounds, together.split(counts), strict=True):
        torch.testing.assert_close(found, encoder.encode([one])[0], rtol=1e-4, atol=1e-5)
        made = config.features(one)
        assert made.shape[0] == config.bands and made.dtype == torch.float32
        frames = config.clip_frames(len(one))
        assert made.shape[1] <= config.feature_frames(frames) and frames <= config.positions
        if not config.fixed_length:
            assert config.frames_of(made.shape[1]) == frames


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_the_least_clip_of_a_step_without_speech(config: EncoderConfig) -> None:
    """What the objective encodes where a batch has no clips: one frame, and gradients of all parameters."""
    encoder = build_encoder(config)
    assert len(encoder.blocks) == config.layers
    silent = torch.zeros(1, config.bands, config.feature_frames(1))
    out = encoder(silent, [silent.shape[2]], [1])
    assert out.shape == (1, config.width)
    (out * 0).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in encoder.parameters() if p.requires_grad)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_sound_that_no_encoder_takes(config: EncoderConfig) -> None:
    with pytest.raises(UserError, match="no samples"):
        make(config).stream().finish()
    long = torch.zeros(config.max_samples + 1)
    if config.long_audio == "refuse":
        with pytest.raises(UserError, match="long_audio=split"):
            config.split(long)
    else:
        assert [len(clip) for clip in config.split(long)] == [config.max_samples, 1]


def test_a_model_stores_the_kind_of_an_encoder_from_outside() -> None:
    config = replace(preset("nano"), encoder=PoolConfig(width=16))
    plain = to_dict(config)
    assert (
        plain["encoder"] == {"kind": "pool", "width": 16, "long_audio": "split"}
        and "kind" not in to_dict(preset("nano"))["encoder"]
    )
    assert from_dict(ModelConfig, plain) == config
    with pytest.raises(UserError, match=r"encoder: unknown key n_mels"):
        from_dict(ModelConfig, {**plain, "encoder": {"kind": "pool", "n_mels": 80}})
    with pytest.raises(UserError, match=r"encoder.kind: encoder 'poll' is unknown; did you mean 'pool'.*--plugin"):
        from_dict(ModelConfig, {**plain, "encoder": {"kind": "poll"}})


def test_an_encoder_that_breaks_its_word_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "forward", lambda self, *_: torch.zeros(3, 8))
    with pytest.raises(UserError, match=r"'pool' made frames \[3, 8\].* \[2, 8\]"):
        make(PoolConfig()).encode([sound(640)])
    monkeypatch.setattr(Pool, "forward", lambda self, *_: None)
    with pytest.raises(UserError, match="'pool'.*NoneType"):
        make(PoolConfig()).encode([sound(640)])
    monkeypatch.setattr(Pool, "forward", lambda self, *_: 1 / 0)
    with pytest.raises(UserError, match="'pool' failed with ZeroDivisionError"):
        make(PoolConfig()).encode([sound(640)])
