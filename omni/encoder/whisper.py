"""The speech encoder: Whisper's modules and weights, run on the sound alone or on its padded window.

In mode "chunked" a frame hears its chunk and what came before, so that a sound can be encoded while it is still coming.

The modules are those of `whisper.model.AudioEncoder`, under `whisper.`, so OpenAI's encoder weights load by name. The forward
pass is implemented here, because Whisper's own `forward` takes full windows only: a batch of clips is one list of frames `[sum
T, D]`, no layer computes padding, and no clip sees another (see `omni.encoder.packing`).

N clips, M mel bands, F feature frames, T encoder frames, D width, H heads.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whisper.model import AudioEncoder, ResidualAttentionBlock

from omni.audio.mel import WINDOW, log_mel
from omni.encoder.base import Encoder, EncoderStream, register_encoder
from omni.encoder.packing import EQUAL_LENGTHS, FEW_LAUNCHES, Chunks, Packing, pack
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.model.attention import attention, multiplied_in, takes_packed
from omni.model.recompute import run_block, selectively
from omni.utils.hardware import to_device

WHOLE = 0.25
"""Share of the batches in training that are heard whole in mode "chunked"."""


@register_encoder(WhisperConfig)
class WhisperEncoder(Encoder):
    """Whisper's encoder over batches of clips.

        mels, lengths = collate([config.features(clip) for clip in clips])
        frames = [config.clip_frames(len(clip)) for clip in clips]
        hidden = encoder(mels, lengths, frames)  # [sum(frames), D], clip after clip

    checkpointing: the part of each block that is computed again in the backward pass (`omni.model.recompute`).
    """

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.config: WhisperConfig = config
        self.whisper = AudioEncoder(config.n_mels, config.positions, config.width, config.heads, 0)
        self.whisper.blocks = nn.ModuleList(EncoderBlock(config.width, config.heads) for _ in range(config.layers))
        self.whisper.ln_post = nn.LayerNorm(config.width)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.whisper.blocks)

    def forward(self, mels: Tensor, mel_lengths: Sequence[int], frames: Sequence[int]) -> Tensor:
        """Encodes N clips: features `[N, M, F max]` to frames `[sum(frames), D]`, one clip behind the other.

        The residual stream has the weights' precision: float32 under autocast.

        Args:
            mel_lengths: F of each clip.
            frames: encoder frames wanted of each clip, as `WhisperConfig.clip_frames` counts them.

        A batch of no clips (`[0, M, 0]`) gives `[0, D]`, and its backward pass a zero gradient for every
        parameter, so that a step without speech is a step like any other under DDP and FSDP.
        """
        return self._encode(mels, mel_lengths, frames, self._chunks(mel_lengths))

    def hear_whole(self, mels: Tensor, lengths: Sequence[int], frames: Sequence[int], padded: bool = False) -> Tensor:
        """Whisper's frames, in mode "chunked" of a sound that begins 12.5 ms later; see `Encoder.hear_whole`."""
        if padded:
            assert self.config.feature_floor is not None
            window = 2 * self.config.positions
            inside = torch.arange(window) < torch.tensor(lengths)[:, None, None]
            whole = F.pad(mels, (0, window - mels.shape[2]))
            mels = torch.where(to_device(inside, mels.device), whole, self.config.feature_floor)
            lengths = [window] * len(lengths)
        return self._encode(mels, lengths, frames, None)

    def _encode(self, mels: Tensor, lengths: Sequence[int], wanted: Sequence[int], chunks: Chunks | None) -> Tensor:
        weight = self.whisper.conv1.weight
        ratio = EQUAL_LENGTHS if weight.device.type == "cpu" else FEW_LAUNCHES
        if self.config.normalize == "clip":
            mels = normalized(mels, lengths, self.config.mel_range, self.config.mel_blur)
        size = self.config.width // self.config.heads
        packing = pack(
            lengths,
            wanted,
            mels.shape[2],
            ratio=ratio,
            device=weight.device,
            bounds=chunks is None and takes_packed(weight.device, multiplied_in(weight), size),
            gap=2 if self.config.streams else 1,
            chunks=chunks,
        )
        x = self._convolve(mels.to(weight), packing)
        x = x + self.whisper.positional_embedding.index_select(0, packing.positions).to(weight.dtype)
        for block in self.whisper.blocks:
            x = run_block(block, self.checkpointing, x, packing)
        return self.whisper.ln_post(x.index_select(0, packing.output))

    def _chunks(self, lengths: Sequence[int]) -> Chunks | None:
        """Chunks of a batch's clips; None where each is heard whole.

        In training they are drawn by the clips' lengths: alike in all processes that share a batch, and when it is computed
        again.
        """
        if not self.config.streams:
            return None
        config, chunk = self.config, self.config.chunk_ms
        if self.training:
            draw = Random(zlib.crc32(str(list(lengths)).encode()))
            low, high = config.train_chunk_ms
            chunk = 0 if draw.random() < WHOLE else low * (high / low) ** draw.random()
        history = None if config.history_ms is None else config.frames_in(config.history_ms)
        return Chunks(max(1, config.frames_in(chunk)) if chunk else config.positions, history) if chunk or history else None

    def stream(self) -> EncoderStream:
        return WhisperStream(self) if self.config.chunk_samples is not None else super().stream()

    def _convolve(self, mels: Tensor, packing: Packing) -> Tensor:
        """Both convolutions (kernel 3; stride 1, then 2) as linear maps of neighbouring rows: `[sum T, D]`.

        The gaps are silenced before each of them, for a clip alone has zero padding around it. As linear
        maps they cost half of `conv1d` over the padded batch (62 ms against 139 ms: 64 clips of 0.6 to 3 s,
        width 128, one core, forward and backward), and a GPU tunes no kernel for every new length.
        """
        x = mels.transpose(1, 2).flatten(0, 1).index_select(0, packing.source).masked_fill(packing.gaps, 0)  # [slots, M]
        x = F.pad(x, (0, 0, 2, 0) if self.config.streams else (0, 0, 1, 1))
        x = self.convolve(x, 1).masked_fill(packing.gaps, 0)
        return self.convolve(F.pad(x, (0, 0, 1, 0)), 2).index_select(0, packing.kept)

    def convolve(self, x: Tensor, stride: Literal[1, 2]) -> Tensor:
        """The convolution with that stride: of 1, `[R + 2, M]` to `[R, D]`, where three neighbouring rows make one; of 2,
        `[1 + 2 R, D]` to `[R, D]`, where the row before each pair, and the pair, make one."""
        if stride == 1:
            conv, rows = self.whisper.conv1, [x[:-2], x[1:-1], x[2:]]
        else:
            conv, rows = self.whisper.conv2, [x[:-1:2], x[1:].reshape(-1, 2 * x.shape[1])]
        return F.gelu(F.linear(torch.cat(rows, dim=1), conv.weight.transpose(1, 2).flatten(1), conv.bias))


class WhisperStream(EncoderStream):
    """Encodes a sound in mode "chunked" while it comes, chunk by chunk; each clip of a longer one begins like a new sound."""

    encoder: WhisperEncoder

    def __init__(self, encoder: WhisperEncoder) -> None:
        self.encoder, self.config = encoder, encoder.config
        history, size = self.config.history_ms, self.config.chunk_samples
        assert size is not None
        self.size, self.history = size, None if history is None else self.config.frames_in(history)
        self.samples = 0
        self.pending: list[Tensor] = []
        self._begin()

    def _begin(self) -> None:
        """Begin a clip."""
        like = self.encoder.whisper.conv1.weight
        self.frames, self.left = 0, self.config.max_samples
        self.before = torch.zeros(WINDOW - self.config.hop)
        self.mels = like.new_zeros(2, self.config.n_mels)
        self.row = like.new_zeros(1, self.config.width)
        heads = self.config.heads
        self.heard = [like.new_zeros(2, 1, heads, 0, self.config.width // heads) for _ in range(self.config.layers)]

    @torch.no_grad()
    def push(self, audio: Tensor) -> Tensor:
        """Takes the next samples [S], of any device; returns the frames [T, D] of the chunks that they complete. UserError:
        they are of another shape, or make the sound longer than the encoder takes; nothing of them is taken."""
        if audio.ndim != 1:
            raise UserError(f"sound of shape {list(audio.shape)} for the encoder: give one channel, [samples]")
        if len(audio):
            self.config.clips(self.samples + len(audio))  # refuses where the configuration does
            self.samples += len(audio)
            self.pending.append(audio.cpu())
        count, at, out = sum(map(len, self.pending)), 0, [self.row[:0]]
        if count >= min(self.size, self.left):
            sound = torch.cat(self.pending)
            while count - at > 0 and (piece := min(self.size, self.left)) <= count - at:
                out.append(self._chunk(sound[at : at + piece]))
                at += piece
                self.left -= piece
                if not self.left:
                    self._begin()
            self.pending = [sound[at:]]
        return torch.cat(out)

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Returns the frames [T, D] that are left when the sound has ended, after which another one starts; UserError as of
        `Encoder.encode`."""
        self.config.clips(self.samples)
        rest = torch.cat(self.pending) if self.pending else torch.zeros(0)
        first = self.left == self.config.max_samples
        whole = len(rest) // self.config.hop * self.config.hop
        out = [self._chunk(rest)] if whole or (first and len(rest)) else []
        self.pending, self.samples = [], 0
        self._begin()
        return torch.cat([self.row[:0], *out])

    def _chunk(self, sound: Tensor) -> Tensor:
        """The frames of the clip's next samples."""
        encoder, whisper = self.encoder, cast(Any, self.encoder.whisper)
        new = log_mel(sound, self.config.n_mels, "fixed", self.config.hop, self.before).T.to(self.mels)
        self.before = torch.cat([self.before, sound.float()])[len(sound) :]
        mels = torch.cat([self.mels, new])
        rows = torch.cat([self.row, encoder.convolve(mels, 1)])
        self.mels, self.row = mels[-2:], rows[-1:]
        x = encoder.convolve(F.pad(rows, (0, 0, 0, len(new) % 2)), 2)
        x = x + whisper.positional_embedding[self.frames : self.frames + len(x)].to(x.dtype)
        self.frames += len(x)
        for layer, block in enumerate(whisper.blocks):
            heard = self.heard[layer] if self.history is None else self.heard[layer][..., -self.history :, :]
            x, self.heard[layer] = block.next_chunk(x, heard)
        return whisper.ln_post(x)


def normalized(mels: Tensor, lengths: Sequence[int], span: float = 8.0, blur: float = 0.0) -> Tensor:
    """Normalises features [N, M, F max] in fp32; zeros behind the clips.

    They are raised to at most `span` below the clip's highest, in log10 of power (a feature is a quarter of it); then each
    band's mean over its clip is subtracted, and the clip is divided by the standard deviation of the rest; last they are
    smoothed over the bands by a Gaussian of standard deviation `blur`.
    """
    length = to_device(torch.tensor(lengths, dtype=torch.float32), mels.device)[:, None, None]
    behind = torch.arange(mels.shape[2], device=mels.device) >= length
    x = mels.float()
    highest = x.masked_fill(behind, float("-inf")).amax((1, 2), keepdim=True)
    x = torch.maximum(x, highest - span / 4).masked_fill(behind, 0.0)
    x = (x - x.sum(2, keepdim=True) / length).masked_fill(behind, 0.0)
    variance = x.square().sum((1, 2), keepdim=True) / (length * mels.shape[1])
    x = x * variance.clamp_min(1e-6).rsqrt()
    if not blur:
        return x
    band = torch.arange(mels.shape[1], dtype=torch.float32)
    weights = torch.exp(-0.5 * ((band[:, None] - band) / blur).square())  # [M, M]; rows sum to 1 at the edges too
    return torch.einsum("nmf,bm->nbf", x, (weights / weights.sum(1, keepdim=True)).to(x.device))


class EncoderBlock(ResidualAttentionBlock):
    """Whisper's block over a packed batch; the same parameters under the same names.

    The norms are PyTorch's: Whisper's own refuse weights in bfloat16, and compute the same otherwise.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.heads = heads
        self.attn_ln = nn.LayerNorm(width)
        self.mlp_ln = nn.LayerNorm(width)

    def forward(self, x: Tensor, packing: Packing, selective: bool = False) -> Tensor:
        """`[sum T, D]` to `[sum T, D]`: attention of each clip to itself, then the MLP, both residual."""
        if selective:
            return selectively(self, self.forward, x, packing)
        y = self.attn_ln(x)
        attended = attend(self.attn.query(y), self.attn.key(y), self.attn.value(y), self.heads, packing)
        x = x + self.attn.out(attended)
        return x + self.mlp(self.mlp_ln(x))

    def next_chunk(self, x: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
        """A clip's next chunk `[T, D]`, whose frames also hear those before it, and the keys and values of all of them; `heard`
        are those before it, `[2, 1, H, S, D / H]`."""
        y = self.attn_ln(x)
        q, k, v = (
            part(y).unflatten(1, (self.heads, -1)).transpose(0, 1)[None]
            for part in (self.attn.query, self.attn.key, self.attn.value)
        )
        heard = torch.cat([heard, torch.stack([k, v])], dim=3)
        x = x + self.attn.out(attention(q, *heard)[0].transpose(0, 1).flatten(1))
        return x + self.mlp(self.mlp_ln(x)), heard


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, packing: Packing) -> Tensor:
    """Attention without a causal mask inside each clip: three times `[sum T, D]` to `[sum T, D]`."""
    if packing.clips is not None:
        q, k, v = (x.unflatten(1, (heads, -1)).transpose(0, 1)[None] for x in (query, key, value))
        return attention(q, k, v, packing.clips)[0].transpose(0, 1).flatten(1)
    if not packing.groups:
        return query + key + value  # no frames: keeps the three projections in the graph
    # One split, not a slice per group: the backward pass of a slice writes a tensor of the whole.
    sizes = [group.rows for group in packing.groups]
    attended = []
    rows = zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
    for group, qkv in zip(packing.groups, rows, strict=True):
        if group.index is not None:  # zeros behind the shorter clips
            qkv = tuple(x.new_zeros(group.clips * group.longest, x.shape[1]).index_copy(0, group.index, x) for x in qkv)
        q, k, v = (x.view(group.clips, group.longest, heads, -1).transpose(1, 2) for x in qkv)
        out = attention(q, k, v, group.mask)
        out = out.transpose(1, 2).flatten(2).flatten(0, 1)
        attended.append(out if group.index is None else out.index_select(0, group.index))
    return torch.cat(attended)
