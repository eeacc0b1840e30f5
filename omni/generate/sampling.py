"""Sampling: keyed random numbers and the draw, as tensors over rows and streams.

A row draws the same ids alone or in a batch and on any device, because its random numbers are not a sequence that
is consumed: the number for (seed, step, stream) is a hash of the three. One uniform number decides each draw,
by the inverse of the cumulative distribution over the ids that the filters leave.

Dimensions: B rows, K streams, A audio streams, N streams of one kind, V vocabulary, R ranks (the R most
likely ids).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from omni.cpu import compiled
from omni.errors import UserError, closest
from omni.generate.options import GREEDY, Sampling, SamplingPlan
from omni.layout import Layout
from omni.utils.hardware import to_device


@torch.inference_mode()
def write_rows(targets: Sequence[Tensor], rows: Sequence[int], values: Sequence[Tensor]) -> None:
    """Write the rows `rows`, in any order, of several tensors together.

    Args:
        targets: tensors [R, ...] on one device, of whole numbers, truth values or fp32 numbers.
        values: for each target the numbers of its rows, [len(rows), ...], on the host.
    """
    device = targets[0].device
    if device.type == "cpu":
        for target, value in zip(targets, values, strict=True):
            target.numpy()[list(rows)] = value.numpy().reshape(len(value), *target.shape[1:])
        return
    whole = (value.view(torch.int32) if value.is_floating_point() else value for value in values)
    parts = [torch.tensor(list(rows))[:, None], *(value.reshape(len(value), -1).long() for value in whole)]
    index, *columns = to_device(torch.cat(parts, dim=1), device).split([part.shape[1] for part in parts], dim=1)
    index = index.flatten()
    for target, column in zip(targets, columns, strict=True):
        number = column.to(torch.int32).view(torch.float32) if target.is_floating_point() else column.to(target.dtype)
        target.index_copy_(0, index, number.view(-1, *target.shape[1:]))


Array = np.ndarray[Any, Any]


def per_stream(layout: Layout, plan: SamplingPlan) -> tuple[Sampling, ...]:
    """The setting of each stream, K of them; UserError for a name that is no stream of the layout."""
    if isinstance(plan, Sampling):
        return (plan,) * len(layout)
    known = ("text", "audio", *layout.names[:-1])
    for name in plan:
        if name not in known:
            raise UserError(f"sampling: {name!r} is no stream; {closest(name, known)}")
    kinds = [s.kind for s in layout.streams]
    return tuple(plan.get(name, plan.get(kind, GREEDY)) for name, kind in zip(layout.names, kinds, strict=True))


# --- keyed random numbers ---------------------------------------------------------------------------------------------

_WORDS = 1 << 64
_GOLDEN, *_MIX = (x - _WORDS for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of SplitMix64, as the int64 with the same bits."""


def seed_key(seed: int, turn: int = 0) -> int:
    """Key of a row's random numbers, an int64, from any integer seed and the number of the turn in a conversation."""
    word = (int(seed) + turn * _GOLDEN) % _WORDS
    return int(_mix(torch.tensor(word - _WORDS if word >> 63 else word)))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014; constants of Vigna's `splitmix64.c`), on int64 that wraps."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def finest(device: torch.device) -> torch.dtype:
    """Number format of running sums: float64, but float32 on Apple's GPUs, which lack float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def uniform(key: Tensor, step: Tensor, streams: range) -> Tensor:
    """One number in [0, 1) per row and stream, [B, N] in the `finest` format, for rows' keys [B] (`seed_key`) and steps [B]."""
    stream = torch.arange(streams.start, streams.stop, device=key.device)
    x = _mix(key + (step + 1) * _GOLDEN)
    x = _mix(x[:, None] + (stream + 1) * _GOLDEN)
    dtype = finest(key.device)
    bits = 53 if dtype == torch.float64 else 23  # so few that neither the number nor its product with a sum is rounded up
    return ((x >> (64 - bits)) & ((1 << bits) - 1)).to(dtype) * 2.0**-bits


# --- the draw ---------------------------------------------------------------------------------------------------------

Settings = Mapping[str, Tensor]
"""Fields of `Sampling`, [B, N] each."""


class Mode(NamedTuple):
    """Parts of the draw that the rows of a step need, known without reading a tensor (a captured graph is made for one mode).

    Attributes:
        plain: some row samples without filters.
        ranks: number of likeliest ids that must be sorted for the rows that filter, 0 where none does.
        penalty: some row has a repetition penalty.
    """

    plain: bool = False
    ranks: int = 0
    penalty: bool = False


def mode_of(settings: Sequence[Sampling], vocabulary: int) -> Mode:
    """The mode that one row needs, by its settings for the streams of one kind."""
    mode = Mode()
    for s in settings:
        filters = s.temperature > 0 and (0 < s.top_k < vocabulary or s.top_p < 1)
        ranks = (s.top_k if 0 < s.top_k < vocabulary else vocabulary) if filters else 0
        plain = mode.plain or (s.temperature > 0 and not filters)
        mode = Mode(plain, max(mode.ranks, ranks), mode.penalty or s.repetition_penalty != 1)
    return mode


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Apply repetition penalties [B, N] to logits [B, N, V] where ids were `seen` [B, N, V] bool."""
    p = penalty[..., None]
    return torch.where(seen, torch.where(logits < 0, logits * p, logits / p), logits)


def candidates(logits: Tensor, settings: Settings, ranks: int) -> tuple[Tensor, Tensor]:
    """Ids that the filters leave of logits [B, N, V], likeliest first. Returns weights [B, N, R] in the `finest` format, in
    proportion to the probabilities and 0 where an id is filtered out, and ids [B, N, R]. `ranks`: R, at least the largest
    `top_k`, or V where one is 0."""
    top_k, top_p = settings["top_k"][..., None], settings["top_p"][..., None]
    if ranks < logits.shape[-1]:
        values, ids = logits.topk(ranks, dim=-1)
    else:
        values, ids = logits.sort(dim=-1, descending=True)
    scaled = (values - values[..., :1]).to(finest(logits.device)) / settings["temperature"][..., None]
    rank = torch.arange(values.shape[-1], device=logits.device)
    kept = (rank < top_k) | (top_k == 0)
    weights = torch.where(kept, scaled.exp(), 0.0)
    mass = weights.cumsum(-1)
    return torch.where(mass - weights < top_p * mass[..., -1:], weights, 0.0), ids


def invert(weights: Tensor, u: Tensor) -> Tensor:
    """Index [B, N] at which the running sum of weights [B, N, V] passes the share u [B, N] of the whole."""
    mass = weights.cumsum(-1)
    target = u[..., None] * mass[..., -1:]
    return torch.searchsorted(mass, target, right=True).squeeze(-1).clamp_max(weights.shape[-1] - 1)


def draw(logits: Tensor, settings: Settings, u: Tensor | None, mode: Mode) -> Tensor:
    """Ids [B, N] drawn from logits [B, N, V] with settings [B, N] and uniform numbers u [B, N].

    `mode` must cover the settings; u may be None where no row samples.
    """
    out = logits.argmax(-1)
    if u is None:
        return out
    temperature = settings["temperature"]
    divisor = torch.where(temperature > 0, temperature, 1.0)
    filters = (settings["top_k"] > 0) | (settings["top_p"] < 1)  # only some of the ids are left
    if mode.plain:
        weights = ((logits - logits.amax(-1, keepdim=True)) / divisor[..., None]).exp().to(finest(logits.device))
        out = torch.where((temperature > 0) & ~filters, invert(weights, u), out)
    if mode.ranks:
        weights, ids = candidates(logits, {**settings, "temperature": divisor}, mode.ranks)
        index = invert(weights, u)
        chosen = ids.gather(-1, index[..., None]).squeeze(-1)
        out = torch.where((temperature > 0) & filters, chosen, out)
    return out


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [B, N] float32 that logits [B, N, V] give ids [B, N], before any penalty, temperature or filter."""
    logits = logits.float()
    return logits.gather(-1, ids[..., None]).squeeze(-1) - logits.logsumexp(-1)


def broken_rows(hidden: Tensor, logits: Tensor) -> Tensor:
    """Rows [B] whose logits [B, V] are not all finite numbers, or whose hidden state [B, 1, W] is zero throughout: its norm was
    infinite."""
    if logits.device.type == "cpu" and logits.dtype == hidden.dtype == torch.float32 and not logits.requires_grad:
        out = torch.empty(len(logits), dtype=torch.bool)
        compiled.broken(np.ascontiguousarray(hidden.numpy()[:, -1]), np.ascontiguousarray(logits.numpy()), out.numpy())
        return out
    finite = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()
    return ~finite | (hidden[:, -1] == 0).all(-1)


class Sampler:
    """Settings, keys and written ids of all rows as tensors at fixed addresses; draws for some of them."""

    def __init__(self, layout: Layout, rows: int, device: torch.device | str | None = None) -> None:
        a, k = layout.n_audio, len(layout)
        self.layout = layout
        self.key = torch.zeros(rows, dtype=torch.long, device=device)
        self.settings = {name: torch.full((rows, k), value, device=device) for name, value in asdict(GREEDY).items()}
        self.targets = (self.key, *self.settings.values())  # what a start writes
        self.seen: Tensor | None = None  # [rows, K, V] bool, made when the first penalty is asked for
        self.row_modes = [(Mode(), Mode())] * rows

        allowed = layout.allowed().sum(1).tolist()  # the ids that may be sampled are the first ones of every stream
        self._text_ids = allowed[a]
        self._audio_ids = max(allowed[:a])
        vocabulary = {s.vocabulary for s in layout.audio}
        self._even = len(vocabulary) == 1 and len(set(allowed[:a])) == 1
        starts = torch.tensor([0, *(s.vocabulary for s in layout.audio)]).cumsum(0).tolist()
        index = torch.full((a, self._audio_ids), starts[-1])  # one past the logits: where -inf is put
        for i, (low, _) in enumerate(pairwise(starts)):
            index[i, : allowed[i]] = torch.arange(low, low + allowed[i])
        self._audio_index = index.to(device)
        self._audio_ranges = np.array(starts[:a]), np.array(allowed[:a])
        self._text_range = np.array([0]), np.array([self._text_ids])
        self._audio_parts = [slice(low, low + count) for low, count in zip(starts[:a], allowed[:a], strict=True)]

    def prepare(self, rows: Sequence[int], settings: Sequence[Sequence[Sampling]], keys: Sequence[int]) -> list[Tensor]:
        """Forget what rows wrote before, and note the modes of their settings, one per stream; returns the numbers for their
        `targets`, on the host."""
        a = self.layout.n_audio
        for row, own in zip(rows, settings, strict=True):
            self.row_modes[row] = (mode_of(own[:a], self._audio_ids), mode_of(own[a:], self._text_ids))
            if any(mode.penalty for mode in self.row_modes[row]):
                self.see()
            if self.seen is not None:
                self.seen[row].fill_(False)
        values = {name: torch.tensor([[getattr(s, name) for s in own] for own in settings]) for name in self.settings}
        sizes = torch.tensor([self._audio_ids] * a + [self._text_ids])
        values["top_k"] = torch.where(values["top_k"] < sizes, values["top_k"], 0)
        return [torch.tensor(keys), *values.values()]

    def see(self) -> Tensor:
        """`seen`, made where it is not there yet."""
        if self.seen is None:
            vocabulary = max(s.vocabulary for s in self.layout.streams)
            shape = len(self.key), len(self.layout), vocabulary
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.key.device)
        return self.seen

    def take(self, other: Sampler) -> None:
        """Copy the rows of a smaller sampler to the first ones of this one."""
        count = len(other.key)
        for mine, theirs in zip(self.targets, other.targets, strict=True):
            mine[:count] = theirs
        if other.seen is not None:
            self.see()[:count] = other.seen
        self.row_modes[:count] = other.row_modes

    def modes(self, rows: Sequence[int]) -> tuple[Mode, Mode]:
        """Modes that these rows need, for the audio streams and for the text stream."""
        audio, text = (
            Mode(any(own.plain for own in part), max(own.ranks for own in part), any(own.penalty for own in part))
            for part in zip(*{self.row_modes[row] for row in rows}, strict=True)
        )
        return audio, text

    def draw(self, logits: Tensor, rows: slice | Tensor, step: Tensor, mode: Mode, text: bool) -> Tensor:
        """Ids [B, N] drawn from a head's logits: of the text stream [B, V], or of the audio streams [B, sum of V]."""
        if not text and mode == Mode() and logits.device.type == "cpu":  # to gather what may be taken costs more
            return torch.stack([logits[:, part].argmax(-1) for part in self._audio_parts], 1)
        logits = self.choices(logits, text)
        if mode == Mode():
            return logits.argmax(-1)
        a = self.layout.n_audio
        logits, streams = logits.float(), slice(a, a + 1) if text else slice(0, a)
        settings = {name: value[rows, streams] for name, value in self.settings.items()}
        if mode.penalty and self.seen is not None:
            logits = penalise(logits, self.seen[rows, streams, : logits.shape[-1]], settings["repetition_penalty"])
        u = uniform(self.key[rows], step, range(streams.start, streams.stop)) if mode.plain or mode.ranks else None
        return draw(logits, settings, u, mode)

    def likeliest(self, hidden: Tensor, logits: Tensor, out: Array, broken: Array, text: bool) -> None:
        """Write what rows take that do not draw, on a CPU in float32, to `out`: of the text stream [B, 1], or of the audio
        streams [B, A]; and which rows are broken, as `broken_rows` has it, to `broken` [B]. Hidden states [B, 1, W] and their
        logits [B, 1, V]."""
        products = np.ascontiguousarray(logits.numpy(force=True)[:, -1])
        starts, counts = self._text_range if text else self._audio_ranges
        compiled.likeliest(products, starts, counts, out)
        compiled.broken(np.ascontiguousarray(hidden.numpy()[:, -1]), products, broken)

    def choices(self, logits: Tensor, text: bool) -> Tensor:
        """Logits [B, N, V] of the ids that the streams of a kind may take, of its head's logits."""
        if text:
            return logits[:, None, : self._text_ids]
        if self._even:
            return logits.view(len(logits), self.layout.n_audio, -1)[..., : self._audio_ids]
        return F.pad(logits, (0, 1), value=float("-inf"))[:, self._audio_index]

    def remember(self, column: Tensor, rows: slice | Tensor) -> None:
        """Note the ids [B, K] that were written, for the repetition penalty."""
        if self.seen is not None and isinstance(rows, slice):
            self.seen[rows].scatter_(2, column[:, :, None], True)
        elif self.seen is not None:
            self.seen[rows] = self.seen[rows].scatter(2, column[:, :, None], True)
