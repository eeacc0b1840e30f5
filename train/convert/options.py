"""Options of `omni-train convert`, and checks: none is ignored, and TARGET replaces nothing but a model's folder, and nothing
that the result does not hold."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat

from omni.checkpoint.places import ADAPTER_CONFIG, ADAPTERS
from omni.encoder.whisper_config import ENCODER_PRESETS, EncoderMode
from omni.errors import UserError, closest
from omni.files import check_replaceable, real_place
from omni.utils.configuration import configuration
from omni.utils.remote import check_there

KINDS = {
    "omni": "a model folder of this project",
    "mini-omni": "a mini-omni or mini-omni2 folder",
    "whisper": "a Whisper: OpenAI's .pt or a Hugging Face folder",
    "snac": "a SNAC codec's folder",
    "mimi": "a Mimi codec's folder",
    "hf": "a language model's Hugging Face folder",
}
"""Descriptions of the formats, for help and messages, in the order in which a path is tried: specific before general."""


@configuration
class ConvertOptions:
    """Options of a conversion.

    Attributes:
        kind: what SOURCE is, where that is not recognised; of a model folder: what TARGET becomes.
        dtype: of all weights; by default as they are.
        overwrite: replace a TARGET that an earlier conversion or training wrote.
        drop_vision: of a mini-omni2: leave its vision adapter out and keep the rest.
        drop_ctc: of a model folder: leave its alignment head out, which only training uses.
        lora: an adapter's folder (PEFT's format), merged into the weights on the way.
        into: a model folder whose encoder is replaced by SOURCE, a Whisper; TARGET is the folder with both.
        keep_text: keep a language model as text: the smallest audio parts (codec2, zeros, a nano encoder), untrained.
        encoder: a Whisper's file or folder, or the name of a size for random weights.
        encoder_mode: padded (whole window then cut, as Whisper was trained: its default), variable (the audio there is) or
            chunked (audio that is still coming); what the others change of its frames is printed.
        encoder_window: seconds of the window, for short questions; by default the Whisper's own, 30.
        codec: the codec that the model will speak: snac (default), codec2, codec2-1600, mimi, mimi-16 or mimi-32.
        codec_folder: the codec's weights, put into the model folder.
        layout: order and delays of the streams: mini-omni, snac or codec2; by default the codec's (of mimi, one delayed stream
            a codebook).
        combine: whether streams' embeddings are summed (text is then unchanged) or averaged (as mini-omni does).
        talker: blocks that speak, and hear what is said, above a language model that only writes; 0: it does both.
        projector: linear, mlp, gated (mini-omni's), or transformer, with a head that reads it as tokens (docs/training.md).
        projector_hidden: inner size of the MLP; by default the language model's.
        projector_stack: encoder frames in one position.
        init: how new tables, heads and ids start: mean, normal or zero.
        seed: of all that is drawn.
        tokenizer: a tokenizer.json, where the folder's own is not there.
        quiet: show nothing while it works.
    """

    kind: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    overwrite: bool = False
    drop_vision: bool = False
    drop_ctc: bool = False
    lora: Path | None = None
    into: Path | None = None
    keep_text: bool = False
    encoder: str | None = None
    encoder_mode: EncoderMode | None = None
    encoder_window: PositiveFloat | None = None
    codec: str | None = None
    codec_folder: Path | None = None
    layout: str | None = None
    combine: Literal["sum", "mean"] = "sum"
    talker: int = 0
    projector: Literal["linear", "mlp", "gated", "transformer"] = "gated"
    projector_hidden: int | None = None
    projector_stack: int = 1
    init: str = "mean"
    seed: int = 0
    tokenizer: Path | None = None
    quiet: bool = False


def check_options(options: ConvertOptions, allowed: tuple[str, ...], reason: str) -> None:
    """Refuse an option that would be ignored (UserError)."""
    for field in fields(ConvertOptions):
        changed = getattr(options, field.name) != field.default
        if changed and field.name not in ("kind", "overwrite", "quiet", "lora", *allowed):
            raise UserError(f"--{field.name} has no meaning here: {reason}; leave it out")


def check(source: Path, target: Path, options: ConvertOptions) -> None:
    """Check what can be checked without reading weights (UserError): the kind, SOURCE, and TARGET, which may not hold other
    inputs, the working folder, or what is no model; SOURCE and `into` may be replaced by the model that is made of them."""
    check_there(source, "model", f"{source} does not exist; give a model's file or folder")
    if options.kind is not None and options.kind not in KINDS:
        raise UserError(f"--kind {options.kind!r} is unknown; {closest(options.kind, KINDS)}")
    real_target = real_place(target)
    encoder = None if options.encoder is None or options.encoder in ENCODER_PRESETS else Path(options.encoder)
    whole = [path for path in (source, options.into) if path and not (path.exists() and path.resolve() == real_target)]
    inputs = [*whole, *(path for path in (options.lora, encoder, options.codec_folder, options.tokenizer) if path)]
    marks = ("config.json", "model_config.yaml", ADAPTER_CONFIG)
    check_replaceable(target, marks, inputs, overwrite=options.overwrite, kept=ADAPTERS)
