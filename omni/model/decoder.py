"""The decoder: columns of parallel streams in, hidden states (and, on request, logits per stream) out.

Dimensions: B batch, K streams, A audio streams, T time, W width, V vocabulary, N features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.config import DecoderConfig
from omni.cpu import Int8Embedding, linear
from omni.cpu.step import DecoderStep
from omni.layout import Layout
from omni.model.attention import PackedRows, multiplied_in, takes_packed, takes_segments
from omni.model.blocks import Block, RMSNorm, rope_frequencies, rope_table
from omni.model.kv_cache import Cache, KVCache
from omni.model.linears import dense_weight, is_quantized
from omni.model.recompute import Recompute, run_block


class Hidden(NamedTuple):
    """Hidden states [B, T, W] for the text head and for the audio heads (the same tensor without a post-adapter)."""

    text: Tensor
    audio: Tensor


class _Where(NamedTuple):
    rope: tuple[Tensor, Tensor]
    mask: Tensor | PackedRows | None
    cache: Cache | None


class Decoder(nn.Module):
    """Embeddings of the streams, transformer blocks, and one head for text and one for all audio streams.

    Audio streams share one table and one head whose rows are the streams' vocabularies one after another; the shift from a
    stream's own id happens here and nowhere else.
    """

    fast = False

    def __init__(self, config: DecoderConfig, layout: Layout) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        self.checkpointing: Recompute = False
        self.step = DecoderStep()
        sizes = [s.vocabulary for s in layout.audio]
        self.audio_offsets = (0, *accumulate(sizes))
        self.text_embedding = nn.Embedding(layout.text.vocabulary, config.width)
        self.audio_embedding = nn.Embedding(self.audio_offsets[-1], config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.post_blocks = nn.ModuleList(Block(config) for _ in range(config.post_layers))
        self.post_norm = RMSNorm(config.width, eps=config.norm_eps) if config.post_layers else None
        self.post_input = nn.Linear(2 * config.width, config.width, bias=False) if layout.talker else None
        self.text_head = None if config.tie_text else nn.Linear(config.width, layout.text.vocabulary, bias=False)
        self.audio_head = nn.Linear(config.width, self.audio_offsets[-1], bias=False)
        self.register_buffer("rope", rope_frequencies(config), persistent=False)
        self.register_buffer("offsets", torch.tensor(self.audio_offsets[:-1])[:, None], persistent=False)
        self.reset_parameters()

    def reset_buffers(self, device: torch.device | None = None) -> None:
        """Compute the buffers that are not stored from the configuration (needed after building on the meta device)."""
        self.rope = rope_frequencies(self.config).to(device)
        self.offsets = torch.tensor(self.audio_offsets[:-1])[:, None].to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """Run by `to`, `half`, `cuda` and `to_empty`: keeps the rotary frequencies exact and in fp32 in a model of another
        precision. Rounded to bf16, their error times the position is soon a radian."""
        before = self.rope
        super()._apply(fn, recurse)
        if self.rope is not before:
            self.reset_buffers(self.rope.device)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw matrices from a normal of standard deviation 0.02, times 1 / sqrt(2 layers) where they write to the residual
        stream (GPT-2).

        Embedding tables that are not also a head start at 0.3: the mean over the streams is then not small beside encoder
        features.
        """
        layers = len(self.blocks) + len(self.post_blocks)
        for name, p in self.named_parameters():
            if p.ndim < 2:
                continue
            std = 0.02
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * layers)
            elif "embedding" in name and not (self.text_head is None and name.startswith("text")):
                std = 0.3
            p.normal_(std=std)

    def embed(self, tokens: Tensor, features: Tensor | None = None, feature_index: Tensor | None = None) -> Tensor:
        """Embed tokens [B, K, T] (ids local to each stream) to [B, T, W]; features [N, W] are used where feature_index
        [B, T] >= 0."""
        a = self.layout.n_audio
        text, beside = self.text_embedding(tokens[:, a]), None
        audio = self.embed_audio(tokens) if self.post_input is None else torch.zeros_like(text)
        if features is not None and feature_index is not None:
            here = (feature_index >= 0)[..., None]
            # Columns without a feature take a row that has no gradient: summed up at one of the features, theirs would be added
            # one after another on a GPU (6.2 ms instead of 0.35 in 8,192 columns on an H200).
            padded = torch.cat([features, features.new_zeros(1, features.shape[1])])
            index = torch.where(feature_index >= 0, feature_index, len(features))
            placed = F.embedding(index, padded, padding_idx=len(features)).to(audio.dtype)
            if self.layout.features == "replace":
                audio = torch.where(here, a * placed if self.config.combine == "mean" else placed, audio)
            else:
                beside = torch.where(here, placed, 0)
        x = audio + text
        if self.config.combine == "mean":
            x = x / len(self.layout)
        return x if beside is None else x + beside

    def embed_audio(self, tokens: Tensor) -> Tensor:
        """The sum of the audio streams' embeddings, [B, T, W]."""
        return self.audio_embedding(tokens[:, : self.layout.n_audio] + self.offsets).sum(1)

    def written(self, tokens: Tensor, feature_index: Tensor | None = None) -> Tensor:
        """Columns [B, T] with text, or a feature."""
        text = self.layout.written(tokens)
        return text if feature_index is None else text | (feature_index >= 0)

    def talker_input(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """What a talker's blocks take: the text head's states joined with the text's embedding, and the audio streams'."""
        assert self.post_input is not None
        text = F.rms_norm(self.text_embedding(tokens[:, self.layout.n_audio]), hidden.shape[-1:])
        return self.post_input(torch.cat([hidden, text.to(hidden.dtype)], -1)) + self.embed_audio(tokens)

    def forward(
        self,
        tokens: Tensor,
        features: Tensor | None = None,
        feature_index: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        packed: PackedRows | None = None,
        left_out: Tensor | None = None,
        input_pos: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        """Hidden states of columns of tokens.

        With `input_pos` and `cache` None this is plain functional training: causal attention, block-diagonal where `segments`
        says so, and nothing is written. With both, keys and values go into the cache at `input_pos`.

        Args:
            tokens: [B, K, T] ids, local to each stream.
            features: [N, W] encoder features of all clips of the batch, from `encode`.
            feature_index: [B, T] index of the feature that a column takes, -1 for none.
            positions: [B, T] rotary positions; by default counted from 0 (again in each segment), or `input_pos`.
            segments: [B, T] number of the example a packed column belongs to.
            packed: the bounds of `segments`, where the host knows them: spares a GPU in half precision the mask.
            left_out: [N] features whose columns nobody sees, in training: all others are as if these were not there.
            input_pos: [B, T] positions of the columns in each row of the cache; -1 writes nothing.
            cache: a `KVCache` (in place, no gradients) or `FunctionalKVCache`.

        Raises:
            ValueError: one of `input_pos` and `cache` without the other.
        """
        if (input_pos is None) != (cache is None):
            present, absent = ("input_pos", "cache") if cache is None else ("cache", "input_pos")
            raise ValueError(f"{present} was given without {absent}: give both to generate over a cache, or neither to train")
        if input_pos is not None and isinstance(cache, KVCache) and positions is None and features is None:
            stepped = self.step(self, tokens, input_pos, cache)
            if stepped is not None:
                return Hidden(*stepped)
        x, whole, order = self.embed(tokens, features, feature_index), tokens.shape[2], None
        if left_out is not None and feature_index is not None:
            order, segments, packed = seen_first(~F.pad(left_out, (0, 1))[feature_index], segments, packed)  # -1: the last
            x, feature_index = _columns(x, order), feature_index.gather(1, order)
            tokens = tokens.gather(2, order[:, None].expand(-1, tokens.shape[1], -1))
        where = self._where(x, segments, packed, positions, input_pos, cache)
        if self.post_input is None:
            x = self._run(self.blocks, 0, x, where)
            text = audio = self.norm(x)
        else:
            text = audio = self._write(x, self.written(tokens, feature_index), segments, packed, where)
            x = self.talker_input(text, tokens)
        if self.post_norm is not None:
            audio = self.post_norm(self._run(self.post_blocks, len(self.blocks), x, where))
        if order is None:
            return Hidden(text, audio)
        placed = _put_back(text, order, whole)
        return Hidden(placed, placed if audio is text else _put_back(audio, order, whole))

    def read_tree(self, tokens: Tensor, seen: Tensor) -> Tensor:
        """States [T, W] for the text head of columns [K, T] of texts that share beginnings: each sees those `seen` [T, T]."""
        x = self.embed(tokens[None])
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, float("-inf"))
        where = _Where(rope_table(self.rope, seen.sum(1)[None] - 1), mask[None, None], None)
        return self.norm(self._run(self.blocks, 0, x, where))[0]

    def _where(
        self,
        x: Tensor,
        segments: Tensor | None,
        packed: PackedRows | None,
        positions: Tensor | None = None,
        input_pos: Tensor | None = None,
        cache: Cache | None = None,
    ) -> _Where:
        """What the blocks are given beside columns x [B, T, W]."""
        mask: Tensor | PackedRows | None
        if input_pos is not None and cache is not None:
            mask = cache.begin_forward(input_pos)
            if positions is None:
                positions = input_pos.clamp_min(0)
        else:
            window, dtype = self.config.window, multiplied_in(x)
            apart = takes_packed(x.device, dtype, self.config.head_size) or takes_segments(x.device, window, self.blocks[0])
            if packed is not None and apart:
                mask = packed._replace(window=window)
            else:
                mask = causal_mask(x.shape[1], segments, window, x.device)
            if positions is None:
                positions = default_positions(x.shape[0], x.shape[1], segments, x.device)
        if isinstance(mask, Tensor):  # converted once, instead of in the attention of every layer
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, float("-inf"))
        return _Where(rope_table(self.rope, positions), mask, cache)

    def _run(self, blocks: nn.ModuleList, first: int, x: Tensor, where: _Where) -> Tensor:
        recompute = self.checkpointing if where.cache is None else False
        for layer, block in enumerate(blocks, first):
            x = run_block(block, recompute, x, *where, layer)
        return x

    def _write(self, x: Tensor, written: Tensor, segments: Tensor | None, packed: PackedRows | None, where: _Where) -> Tensor:
        """States [B, T, W] of a language model below a talker: zeros where nothing is written, columns that it does not see."""
        if where.cache is not None:  # they come when all is written
            y = self.norm(self._run(self.blocks, 0, x, where))
        else:
            order, segments, packed = seen_first(written, segments, packed)
            read = _columns(x, order)
            y = self.norm(self._run(self.blocks, 0, read, self._where(read, segments, packed)))
            y = _put_back(y, order, x.shape[1])
        return torch.where(written[..., None], y, 0)

    # --- heads -----------------------------------------------------------------------------------------------------

    @property
    def text_weight(self) -> Tensor:
        """Weight of the text head, [V, W]."""
        return _weight(self.text_embedding if self.text_head is None else self.text_head)

    @property
    def text_table(self) -> Tensor:
        """Weight of the text embedding, [V, W], whole where processes share it."""
        table = _weight(self.text_embedding)
        return table.full_tensor() if hasattr(table, "full_tensor") else table

    @property
    def audio_weight(self) -> Tensor:
        """Weight of the audio streams' head, [sum of V, W]."""
        return _weight(self.audio_head)

    def head_weight(self, stream: int) -> Tensor:
        """The rows [V, W] of the head that belong to one stream (a view)."""
        if stream == self.layout.n_audio:
            return self.text_weight
        return self.audio_weight[self.audio_offsets[stream] : self.audio_offsets[stream + 1]]

    def text_logits(self, hidden: Hidden) -> Tensor:
        """[..., V of text]."""
        return self._head_logits(self.text_embedding if self.text_head is None else self.text_head, hidden.text)

    def audio_logits(self, hidden: Hidden) -> Tensor:
        """[..., sum of the audio vocabularies], the streams one after another."""
        return self._head_logits(self.audio_head, hidden.audio)

    def _head_logits(self, head: nn.Module, x: Tensor) -> Tensor:
        logits = self.step.logits(self, head, x)
        return linear(self.fast, head, x) if logits is None else logits

    def logits(self, hidden: Hidden) -> list[Tensor]:
        """Logits of every stream, [..., V of the stream] each, in the layout's order."""
        sizes = [stream.vocabulary for stream in self.layout.audio]
        return [*self.audio_logits(hidden).split(sizes, -1), self.text_logits(hidden)]


def _weight(head: nn.Linear | nn.Embedding) -> Tensor:
    """The weight of a head, or of the table that it is tied to."""
    if isinstance(head, Int8Embedding):
        return head.dense()
    return dense_weight(head) if is_quantized(head) else head.weight


def seen_first(seen: Tensor, segments: Tensor | None, packed: PackedRows | None) -> tuple[Tensor, Tensor, PackedRows | None]:
    """An order [B, T] of columns in which each row's other columns follow those seen [B, T], as a segment of their own; and the
    segments and their bounds in it. On a CPU it ends with the last seen of the longest row; a GPU is not waited for."""
    rows, time = seen.shape
    segments = torch.zeros_like(seen, dtype=torch.long) if segments is None else segments
    rank = F.pad((segments[:, 1:] != segments[:, :-1]).cumsum(1), (1, 0))
    rank, order = torch.where(seen, rank, time).sort(stable=True, dim=1)
    kept = time if seen.is_cuda else max(int(seen.sum(1).max()), 1)
    if packed is not None:
        before, row = F.pad(seen.flatten().cumsum(0), (1, 0)), packed.ends.long() // time
        at = torch.arange(rows, device=seen.device)
        ends = row * kept + before[packed.ends.long()] - before[row * time]
        others = at * kept + before[(at + 1) * time] - before[at * time]
        packed = packed._replace(ends=torch.cat([ends, others]).sort().values.int(), longest=time)
    return order[:, :kept], rank[:, :kept], packed


def _columns(x: Tensor, order: Tensor) -> Tensor:
    """The columns of x [B, T, W] in an order."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def _put_back(x: Tensor, order: Tensor, time: int) -> Tensor:
    """`_columns` back in their places, [B, T, W]; zeros in others."""
    index = order[..., None].expand(x.shape)
    return x.new_zeros(len(x), time, x.shape[-1]).scatter(1, index, x)


def default_positions(batch: int, time: int, segments: Tensor | None, device: torch.device) -> Tensor:
    """Positions [B, T] counted from 0 again in each segment."""
    index = torch.arange(time, device=device).expand(batch, time)
    if segments is None:
        return index
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - torch.where(starts, index, 0).cummax(1).values


def causal_mask(time: int, segments: Tensor | None, window: int | None, device: torch.device) -> Tensor | None:
    """Attention mask without a cache, [B or 1, 1, T, T] bool; None where plain causal attention is enough."""
    if segments is None and (window is None or window >= time):
        return None
    index = torch.arange(time, device=device)
    distance = index[:, None] - index[None, :]
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    mask = mask[None, None]
    if segments is not None:
        mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
    return mask
