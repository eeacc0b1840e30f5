"""Options of `omni-train convert`, and the check that none is ignored."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from omni.errors import UserError


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion.

    Attributes:
        kind: what SOURCE is, where that is not recognised; of a model folder: what TARGET becomes.
        dtype: float32, bfloat16 or float16 for all weights; by default as they are.
        overwrite: replace a TARGET that an earlier conversion or training wrote.
        drop_vision: of a mini-omni2: leave its vision adapter out and keep the rest.
        drop_ctc: of a model folder: leave its alignment head out, which only training uses.
        lora: an adapter's folder (PEFT's format), merged into the weights on the way.
        into: a model folder whose encoder is replaced by SOURCE, a Whisper; TARGET is the folder with both.
        keep_text: keep a language model as text: the smallest audio parts (codec2, zeros, a nano encoder), untrained.
        encoder: a Whisper's file or folder, or the name of a size for random weights.
        encoder_mode: padded (30 s window then cut, as Whisper was trained: its default) or variable (the audio there is).
        codec: the codec that the model will speak: snac (default), codec2, mimi, mimi-16 or mimi-32.
        codec_folder: the codec's weights, put into the model folder.
        layout: order and delays of the streams: mini-omni, snac or codec2; by default the codec's (of mimi, one delayed stream
            a codebook).
        combine: whether streams' embeddings are summed (text is then unchanged) or averaged (as mini-omni does).
        projector: linear, mlp or gated (mini-omni's).
        projector_hidden: inner size of mlp and gated; by default the language model's.
        projector_stack: encoder frames in one position.
        init: how new tables, heads and ids start: mean, normal or zero.
        seed: of all that is drawn.
        tokenizer: a tokenizer.json, where the folder's own is not there.
        quiet: show nothing while it works.
    """

    kind: str | None = None
    dtype: str | None = None
    overwrite: bool = False
    drop_vision: bool = False
    drop_ctc: bool = False
    lora: Path | None = None
    into: Path | None = None
    keep_text: bool = False
    encoder: str | None = None
    encoder_mode: Literal["padded", "variable"] | None = None
    codec: str | None = None
    codec_folder: Path | None = None
    layout: str | None = None
    combine: Literal["sum", "mean"] = "sum"
    projector: Literal["linear", "mlp", "gated"] = "gated"
    projector_hidden: int | None = None
    projector_stack: int = 1
    init: str = "mean"
    seed: int = 0
    tokenizer: Path | None = None
    quiet: bool = False


def check_options(options: ConvertOptions, allowed: tuple[str, ...], what: str) -> None:
    """Refuse an option that would be ignored (UserError)."""
    for field in fields(ConvertOptions):
        given = getattr(options, field.name) != field.default
        if given and field.name not in ("kind", "overwrite", "quiet", "lora", *allowed):
            raise UserError(f"--{field.name} has no meaning here: {what}; leave it out")
