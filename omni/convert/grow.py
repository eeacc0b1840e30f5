"""Grows a language model into a speech language model: its weights, an encoder, and new rows, tables and heads.

The text table keeps the original's rows, followed by rows for the layout's special ids. New rows are initialised by a named
rule (`RULES`); all draws are keyed by the seed and the tensor's name, so that a rule gives the same weights on any machine and
in any order.

The audio streams' pad ids always start at zero. With `combine: sum` the embedding of a column without sound is then that of its
text alone, and before any training the grown model reads and writes text exactly as the original did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from whisper.model import sinusoids

from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.convert.contract import Foreign, TextConfig, shapes_of
from omni.convert.huggingface import EMBEDDING, HEAD, pad_rows
from omni.convert.lazy import Lazy, cast, joined
from omni.convert.parts import shorten_window
from omni.encoder.whisper import WhisperEncoder
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError, closest
from omni.layout import SPECIALS, Layout
from omni.model.blocks import Block, RMSNorm
from omni.model.projector import Projector, TokenHead

AUDIO_EMBEDDING, AUDIO_HEAD = "decoder.audio_embedding.weight", "decoder.audio_head.weight"

NOISE = 0.1
"""Noise of the rule `mean`, in standard deviations of the table's rows: new ids start near an average token, yet distinct."""


class RowStatistics(NamedTuple):
    """Mean and standard deviation [W] of a table's rows."""

    mean: Tensor
    deviation: Tensor


Rule = Callable[[RowStatistics, torch.Generator, int], Tensor]


RULES: dict[str, Rule] = {
    "mean": lambda s, g, rows: s.mean + NOISE * s.deviation * torch.randn(rows, len(s.mean), generator=g),
    "normal": lambda s, g, rows: s.deviation.square().mean().sqrt() * torch.randn(rows, len(s.mean), generator=g),
    "zero": lambda s, g, rows: torch.zeros(rows, len(s.mean)),
}
"""Initialisation of new rows, from statistics of the text table's rows (for heads: the text head's) of known tokens:

mean: the mean row, plus noise of a tenth of each dimension's deviation (new ids take no probability from known ones).
normal: noise around zero with the table's overall deviation.
zero: zeros.

Under `combine: sum` the rows of the audio embedding are drawn for their sum over A streams: means are divided by A, noise by
its root.
"""


@dataclass(frozen=True)
class Growth:
    """Settings of growing a language model.

    Attributes:
        layout: its text stream has as many ids as the language model's table has rows.
        rule: initialisation of new rows (`RULES`).
        combine: how embeddings of streams become one, as in `DecoderConfig`.
        talker: number of its blocks, see `Layout`; 0 for none.
    """

    layout: Layout
    codec: str
    projector: ProjectorConfig
    rule: str = "mean"
    combine: str = "sum"
    seed: int = 0
    talker: int = 0


def grow(text: Foreign, encoder: Foreign | WhisperConfig, growth: Growth, dtype: torch.dtype) -> Foreign:
    """Build a whole model around a language model. UserError: an unknown rule, or a layout whose text stream is not the
    language model's.

    Args:
        encoder: a speech encoder's weights, or a size whose weights are drawn.
        dtype: the type that all weights get.
    """
    known, layout = text.config, growth.layout
    if not isinstance(known, TextConfig):
        raise UserError(f"{text.path} is no language model; only one can be grown into a speech model")
    if known.chat is not None:
        layout = replace(layout, streams=(*layout.audio, replace(layout.text, end=known.end)), chat=known.chat)
    if growth.rule not in RULES:
        raise UserError(f"init {growth.rule!r} is unknown; {closest(growth.rule, RULES)}")
    if layout.text.size != known.size:
        raise UserError(f"the layout's text stream has {layout.text.size} ids, the table of {text.path} has {known.size} rows")
    heard = encoder if isinstance(encoder, WhisperConfig) else encoder.config
    assert isinstance(heard, WhisperConfig)
    layout = replace(layout, talker=growth.talker > 0)
    decoder = replace(known.decoder, combine=growth.combine, post_layers=growth.talker)  # type: ignore[arg-type]
    clips = growth.projector.kind == "transformer"
    config = ModelConfig(layout, heard, growth.projector, decoder, growth.codec, ctc="tokens" if clips else 0)
    tensors = dict(text.tensors)
    size = len(text.tokenizer) if text.tokenizer is not None else known.size
    streams = layout.n_audio if growth.combine == "sum" else 1
    own = {name: statistics(tensors[name].rows(0, min(size, known.size))) for name in (EMBEDDING, HEAD) if name in tensors}
    for table, audio, share in ((EMBEDDING, AUDIO_EMBEDDING, streams), (HEAD, AUDIO_HEAD, 1)):
        seen = own.get(table, own[EMBEDDING])
        if table in tensors:
            specials = _new_rows(table, layout.text.vocabulary - known.size, seen, growth, dtype)
            if known.chat is not None and table == EMBEDDING:  # what is heard stands alone in the question
                specials = _silent(specials, [SPECIALS["text"]["pad"]])
            tensors[table] = joined([text.tensors[table].to(dtype, table), specials])
        rows = sum(stream.vocabulary for stream in layout.audio)
        if growth.talker:  # whose streams are beside no text: their sum is of size 1, and so are the logits
            deviation = torch.ones_like(seen.mean) / math.sqrt(streams if audio == AUDIO_EMBEDDING else decoder.width)
            tensors[audio] = _new_rows(audio, rows, RowStatistics(seen.mean, deviation), replace(growth, rule="normal"), dtype)
        else:
            shared = RowStatistics(seen.mean / share, seen.deviation / math.sqrt(share))
            tensors[audio] = _new_rows(audio, rows, shared, growth, dtype)
    tensors[AUDIO_EMBEDDING] = _silent(tensors[AUDIO_EMBEDDING], pad_rows(layout))
    for part, kind, arguments in _talker(decoder):
        tensors |= fresh(kind, arguments, f"decoder.{part}.", growth.seed, dtype)
    tensors |= fresh(Projector, (growth.projector, heard.width, decoder.width), "projector.", growth.seed, dtype)
    if clips:  # with the head that aligns it, so that adapters trained with both fit
        rms = (own[EMBEDDING].mean.square() + own[EMBEDDING].deviation.square()).mean().sqrt()
        tensors |= fresh(TokenHead, (decoder.width,), "alignment_head.", growth.seed, dtype)
        tensors["projector.project.scale"] = Lazy.of((rms[None] / config.feature_factor).to(dtype))
    if isinstance(encoder, Foreign):
        tensors |= encoder.tensors
    else:
        tensors |= fresh(WhisperEncoder, (encoder,), "encoder.", growth.seed, dtype)
    return Foreign("omni", text.path, config, cast(tensors, dtype), text.tokenizer, extra=text.extra)


def _talker(decoder: DecoderConfig) -> Iterator[tuple[str, type[nn.Module], tuple[object, ...]]]:
    """The parts of a talker: name, kind, and what it is made of."""
    if decoder.post_layers:
        yield from ((f"post_blocks.{layer}", Block, (decoder,)) for layer in range(decoder.post_layers))
        yield "post_norm", RMSNorm, (decoder.width,)
        yield "post_input", nn.Linear, (2 * decoder.width, decoder.width, False)


def with_encoder(model: Foreign, encoder: Foreign) -> Foreign:
    """Replace a whole model's encoder weights, in the model's type; its mode, floor, splitting and window stay unchanged.
    UserError: the encoder has another shape than the model's."""
    ours, theirs = model.config, encoder.config
    if not (isinstance(ours, ModelConfig) and isinstance(ours.encoder, WhisperConfig) and isinstance(theirs, WhisperConfig)):
        raise UserError(f"{model.path} must be a model folder with a Whisper encoder and {encoder.path} a Whisper")
    for key in ("n_mels", "width", "heads", "layers"):
        wanted, actual = getattr(ours.encoder, key), getattr(theirs, key)
        if wanted != actual:
            raise UserError(f"encoder.{key} is {actual} in {encoder.path} and {wanted} in {model.path}: the weights do not fit")
    if ours.encoder.hop != theirs.hop:
        raise UserError(f"{model.path} has a hop of {ours.encoder.hop} samples, a Whisper of {theirs.hop}: they do not fit")
    encoder = shorten_window(encoder, ours.encoder.window_seconds)
    dtype = model.tensors[EMBEDDING].dtype
    tensors = {name: t.to(dtype, name) for name, t in encoder.tensors.items()}
    return replace(model, tensors={**model.tensors, **tensors})


def statistics(table: Lazy) -> RowStatistics:
    """Mean and deviation of a table's rows, read in pieces and summed in double precision."""
    total = torch.zeros(table.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for start in range(0, table.length, 1024):
        rows = table.read(start, min(start + 1024, table.length)).double()
        total += rows.sum(0)
        squares += rows.square().sum(0)
    mean = total / table.length
    return RowStatistics(mean.float(), (squares / table.length - mean.square()).clamp_min(0).sqrt().float())


def _new_rows(name: str, rows: int, seen: RowStatistics, growth: Growth, dtype: torch.dtype) -> Lazy:
    rule = RULES[growth.rule]
    return Lazy.drawn((rows, len(seen.mean)), dtype, lambda g, n: rule(seen, g, n), name, growth.seed)


def _silent(table: Lazy, pads: Sequence[int]) -> Lazy:
    """A table with zeros for the rows of pad ids."""
    parts = []
    for start, pad in zip([0, *(pad + 1 for pad in pads)], pads, strict=False):
        parts += [table.rows(start, pad), Lazy.filled((1, *table.shape[1:]), table.dtype)]
    return joined([*parts, table.rows(pads[-1] + 1, table.length)])


def fresh(
    module_type: type[nn.Module], arguments: tuple[object, ...], prefix: str, seed: int, dtype: torch.dtype
) -> dict[str, Lazy]:
    """Makes new weights for a module, drawn when they are read. Linear layers and convolutions start as PyTorch's do (uniform
    within 1 / sqrt(fan in)), norms at one and zero, Whisper's positions at its sinusoids."""
    shapes = shapes_of(lambda: module_type(*arguments))
    out: dict[str, Lazy] = {}
    for name, shape in shapes.items():
        weight = shapes.get(name.rpartition(".")[0] + ".weight", shape)
        if name.endswith("positional_embedding"):
            out[prefix + name] = Lazy.of(sinusoids(*shape).to(dtype))
        elif len(weight) == 1:
            out[prefix + name] = Lazy.filled(shape, dtype, float(name.endswith("weight")))
        else:
            bound = 1 / math.sqrt(math.prod(weight[1:]))
            draw = lambda g, n, row=shape[1:], bound=bound: (2 * torch.rand(n, *row, generator=g) - 1) * bound  # noqa: E731
            out[prefix + name] = Lazy.drawn(shape, dtype, draw, prefix + name, seed)
    return out
