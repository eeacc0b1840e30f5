"""`omni-train convert SOURCE TARGET`: converts other projects' weights into our model folder, and the other way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from omni.audio.io import SAMPLE_RATE, read_audio
from omni.checkpoint.tensors import FileStamp
from omni.codec.registry import CODECS
from omni.config import ModelConfig, ProjectorConfig
from omni.convert import huggingface, mini_omni, parts
from omni.convert import omni_folder as streamed
from omni.convert.contract import WORDS, CodecConfig, Foreign, TextConfig, one_dtype
from omni.convert.grow import Growth, grow, with_encoder
from omni.convert.lazy import WriteCallback, cast
from omni.convert.parts import load_encoder, read_whisper, shorten_window, write_codec
from omni.encoder.whisper_config import ENCODER_PRESETS, WhisperConfig
from omni.errors import UserError, closest
from omni.files import real_place
from omni.layout import Layout
from omni.lora import peft
from omni.pretrained import QUESTION, find_question
from omni.utils.remote import check_there
from train.console.progress import Bar
from train.convert.options import KINDS, ConvertOptions, check, check_options


@dataclass(frozen=True)
class Format:
    """One checkpoint format; see `omni/convert/contract.py` for the three functions.

    Attributes:
        write: writes a whole model of ours in this format, where that is possible.
        loses: parts of a whole model that this format does not hold.
    """

    recognise: Callable[[Path], bool]
    read: Callable[[Path], Foreign]
    write: Callable[[Foreign, Path, WriteCallback | None], dict[str, FileStamp]] | None = None
    loses: str = ""


FORMATS: dict[str, Format] = {
    "omni": Format(streamed.recognise, streamed.read, streamed.write),
    "mini-omni": Format(
        mini_omni.recognise, mini_omni.read, mini_omni.write, "the codec's weights and what its config.json says"
    ),
    "whisper": Format(partial(parts.recognise, "whisper"), parts.read_whisper),
    "snac": Format(partial(parts.recognise, "snac"), partial(parts.read_codec, "snac")),
    "mimi": Format(partial(parts.recognise, "mimi"), partial(parts.read_codec, "mimi")),
    "hf": Format(
        huggingface.recognise,
        huggingface.read,
        huggingface.write,
        "all but its text part: encoder, projector, audio tables and heads, the codec's weights",
    ),
}
"""Formats by the name that `--kind` takes, in the order in which they are tried on a path: specific before general."""


def kind_of(path: Path) -> str:
    """The format of a file or folder; UserError where there is none, or none is recognised."""
    check_there(path, "model", f"{path} does not exist; give a model's file or folder")
    for name, known in FORMATS.items():
        if known.recognise(path):
            return name
    refuse_file(path)
    kinds = "; ".join(f"{name}: {label}" for name, label in KINDS.items())
    raise UserError(f"{path} is not recognised; name what it is with --kind ({kinds})")


def refuse_file(path: Path, format_name: str | None = None) -> None:
    """Refuse a file where `format_name` is a format of folders (UserError naming the file's folder)."""
    if path.is_file() and format_name != "whisper":
        raise UserError(f"{path} is a file, and only a Whisper may be one; give the folder that it is in: {path.parent}")


def open_foreign(path: Path) -> Foreign:
    """Open a checkpoint without reading its weights. UserError: it is of no format, or its files do not fit it."""
    format_name = kind_of(path)
    refuse_file(path, format_name)
    return FORMATS[format_name].read(path)


def check_in_place(source: Path, target: Path, from_format: str, becomes: str = "omni") -> None:
    """Refuse a SOURCE in `from_format` that is TARGET too and `becomes` a format that does not hold all of it (UserError)."""
    if source.resolve() != real_place(target) or from_format == becomes == "omni":
        return
    if becomes != "omni":
        loses = FORMATS[becomes].loses
        raise UserError(f"{target} is SOURCE too: as {KINDS[becomes]} it would lose {loses}; give another TARGET")
    raise UserError(f"{target} is SOURCE too: {KINDS[from_format]}, whose own files would be lost; give another TARGET")


def convert(source: Path, target: Path, options: ConvertOptions, bar: Bar | None = None) -> tuple[str, dict[str, FileStamp]]:
    """Convert SOURCE to TARGET; returns a short description of it, and the files written with their checksums. UserError for
    anything that does not fit; nothing is left at TARGET then."""
    check(source, target, options)
    if peft.recognise(source):
        return convert_adapter(source, target, options)
    if source.is_dir() and streamed.recognise(source):
        return export(_adapted(streamed.read(source), options), target, options, bar)
    source_format = options.kind or kind_of(source)
    check_in_place(source, target, source_format)
    foreign = _adapted(read_source(source, source_format, options), options)
    config = foreign.config
    if options.into is not None and not isinstance(config, WhisperConfig):
        raise UserError(f"--into takes a Whisper, but {source} is {KINDS[foreign.format]}")
    if isinstance(config, CodecConfig):
        check_options(options, (), f"{source} is a codec")
        return f"codec {config.name}", write_codec(foreign, target, bar)
    if isinstance(config, TextConfig):
        return grow_speech_model(foreign, target, options, bar)
    if isinstance(config, ModelConfig):
        return f"speech model from {source}", write_model(foreign, target, options, bar)
    if options.into is None:
        raise UserError(
            f"{source} is an encoder; name the model folder it belongs into with --into, or grow a language model around it: "
            f"convert LANGUAGE_MODEL {target} --encoder {source}"
        )
    check_options(options, ("into", "dtype"), f"{source} is an encoder")
    model = with_encoder(streamed.read(options.into), foreign)
    return f"{options.into} with the encoder of {source}", streamed.write(_typed(model, options), target, bar)


def read_source(source: Path, source_format: str, options: ConvertOptions) -> Foreign:
    """Open SOURCE together with the encoder or tokenizer that the options name."""
    refuse_file(source, source_format)
    if source_format == "hf":
        return huggingface.read(source, options.tokenizer)
    if source_format == "mini-omni":
        encoder = choose_encoder(options) if options.encoder is not None else None
        return mini_omni.read(source, encoder=encoder, tokenizer=options.tokenizer, drop_vision=options.drop_vision)
    return FORMATS[source_format].read(source)


def _adapted(model: Foreign, options: ConvertOptions) -> Foreign:
    """The model with the adapter of `--lora` merged into its weights; as it is where none is given."""
    if options.lora is None:
        return model
    if not isinstance(model.config, (ModelConfig, TextConfig)):
        raise UserError(f"--lora has no meaning here: {model.path} is {KINDS[model.format]}; leave it out")
    return peft.merged(model, options.lora)


def convert_adapter(source: Path, target: Path, options: ConvertOptions) -> tuple[str, dict[str, FileStamp]]:
    """Write an adapter's folder again, with transformers' names of linears (`--kind hf`) or ours (`--kind omni`)."""
    if options.kind not in ("hf", "omni"):
        raise UserError(
            f"{source} is an adapter; say whose names its linears get with --kind: hf or omni; to merge it into a model: "
            f"convert MODEL {target} --lora {source}"
        )
    check_options(options, ("dtype",), f"{source} is an adapter")
    adapter, theirs = peft.load_adapter(source), options.kind == "hf"
    if options.dtype is not None:
        adapter = adapter.to(getattr(torch, options.dtype))
    cut = theirs and peft.rows_left_out(adapter)
    if cut and source.resolve() == real_place(target):
        raise UserError(f"{target} is SOURCE too: under transformers' names it would lose {cut}; give another TARGET")
    files = peft.save_adapter(target, adapter, names="transformers" if theirs else "omni")
    left = f", without {cut}" if cut else ""
    return f"the adapter of {source} with {'transformers' if theirs else 'our own'} names{left}", files


def export(model: Foreign, target: Path, options: ConvertOptions, bar: Bar | None) -> tuple[str, dict[str, FileStamp]]:
    """Write our model folder in the format `--kind`, or again as a model folder with other parts."""
    kinds = [name for name, known in FORMATS.items() if known.write is not None]
    if options.kind is None and any((options.lora, options.dtype, options.encoder, options.codec_folder, options.drop_ctc)):
        options = replace(options, kind="omni")
    if options.kind is None:
        raise UserError(f"{model.path} is a model folder already; say what it becomes with --kind: {', '.join(kinds)}")
    write = FORMATS[options.kind].write
    if write is None:
        raise UserError(f"a model folder cannot be written as {KINDS[options.kind]}; --kind may be {', '.join(kinds)}")
    if options.kind == "omni":
        return f"{model.path} again", write_model(model, target, options, bar)
    check_options(options, ("dtype",), f"{model.path} goes out as {options.kind}")
    check_in_place(model.path, target, model.format, options.kind)
    return f"{model.path} as {KINDS[options.kind]}", write(_typed(model, options), target, bar)


def write_model(model: Foreign, target: Path, options: ConvertOptions, bar: Bar | None) -> dict[str, FileStamp]:
    """Write a complete speech model as a model folder, with another encoder or the codec's weights where they are given."""
    own = {"mini-omni": ("tokenizer", "drop_vision", "encoder_mode", "encoder_window"), "omni": ("drop_ctc",)}
    taken = "dtype", "encoder", "codec_folder", *own.get(model.format, ())
    check_options(options, taken, f"{model.path} is a whole speech model")
    if options.encoder is not None and model.format != "mini-omni":  # a mini-omni got its encoder in `read_source`
        encoder = choose_encoder(options)
        if not isinstance(encoder, Foreign):
            raise UserError(f"--encoder {options.encoder}: {model.path} is a whole model; give a Whisper's file or folder")
        model = with_encoder(model, encoder)
    config = model.config
    assert isinstance(config, ModelConfig)
    if options.drop_ctc and config.ctc == "tokens":
        raise UserError(f"--drop_ctc: the decoder of {model.path} takes what its alignment head reads; leave it in")
    if options.drop_ctc:
        tensors = {name: tensor for name, tensor in model.tensors.items() if not name.startswith("alignment_head.")}
        model = replace(model, tensors=tensors, config=replace(config, ctc=0, ctc_sounds=0))
    return streamed.write(_typed(model, options), target, bar, codec=codec_of(options, config.codec))


def codec_of(options: ConvertOptions, codec: str) -> Foreign | None:
    """Open the weights in `codec_folder`, None without one; UserError where they are of another codec than the model's."""
    if options.codec_folder is None:
        return None
    weights = open_foreign(options.codec_folder)
    if not isinstance(weights.config, CodecConfig) or weights.config.name != (CODECS.find(codec).kind or codec):
        raise UserError(f"--codec_folder {options.codec_folder} holds {weights.format}, the model's codec is {codec}")
    return weights


def grow_speech_model(
    text: Foreign, target: Path, options: ConvertOptions, bar: Bar | None
) -> tuple[str, dict[str, FileStamp]]:
    """Grow a language model into a speech model and write its folder."""
    assert isinstance(text.config, TextConfig)
    dtype = getattr(torch, options.dtype) if options.dtype else one_dtype(text)
    if options.keep_text:
        check_options(options, ("keep_text", "dtype", "seed", "tokenizer"), "--keep_text leaves sound aside")
        growth = Growth(
            Layout.preset("codec2", text.config.size), "none", ProjectorConfig("linear"), "zero", "sum", options.seed
        )
        model = grow(text, ENCODER_PRESETS["nano"], growth, dtype)
        words = f"a text model{chat_words(text)}; its audio parts are the smallest there are, and untrained"
        return words, streamed.write(model, target, bar)
    layout, codec = choose_layout(options, text.config.size)
    hidden = options.projector_hidden or text.config.decoder.mlp_width
    projector = ProjectorConfig(options.projector, hidden, options.projector_stack)
    encoder = choose_encoder(options)
    growth = Growth(layout, codec, projector, options.init, options.combine, options.seed, options.talker)
    model = grow(text, encoder, growth, dtype)
    heard = f"the encoder of {encoder.path}" if isinstance(encoder, Foreign) else f"a random {options.encoder} encoder"
    words = f"{text.path} grown by the rule {options.init}, with {heard}{chat_words(text)}"
    return words, streamed.write(model, target, bar, codec=codec_of(options, codec))


def chat_words(text: Foreign) -> str:
    """How a language model is asked, for a description; nothing of one without a chat template."""
    assert isinstance(text.config, TextConfig)
    if text.config.chat is not None:
        return ", asked in its own chat format"
    templated = "chat_template" in text.extra.get("hf", {}).get(WORDS, {})
    return ", whose chat template is none that columns can follow" if templated else ""


def choose_layout(options: ConvertOptions, size: int) -> tuple[Layout, str]:
    """The layout for a text embedding of `size` rows, and the name of its codec."""
    codec = options.codec or {"mini-omni": "snac", None: "snac"}.get(options.layout, str(options.layout))
    CODECS.find(codec, "--codec")
    spec = CODECS.find(codec)
    sizes, preset = spec.codebook_sizes, options.layout or spec.layout
    layout = Layout.preset(preset, size) if preset else Layout.build(sizes, size)
    if layout.codebook_sizes != sizes:
        raise UserError(
            f"--layout {options.layout} has codebooks {layout.codebook_sizes}, the codec {codec} {sizes}; choose others"
        )
    return layout, codec


def choose_encoder(options: ConvertOptions) -> Foreign | WhisperConfig:
    """The encoder of a Whisper's file or folder, or the configuration of a preset whose weights are drawn."""
    if options.encoder is None:
        raise UserError(
            "--encoder is missing: give a Whisper's .pt file or folder, or a size for random weights "
            f"({', '.join(ENCODER_PRESETS)}); or keep the model as text with --keep_text"
        )
    if options.encoder in ENCODER_PRESETS:
        size = ENCODER_PRESETS[options.encoder]
        window = options.encoder_window or size.window_seconds
        return replace(size, mode=options.encoder_mode or size.mode, window_seconds=window)
    path = Path(options.encoder)
    if not path.exists():
        raise UserError(
            f"--encoder {options.encoder!r} is neither a file nor a size; {closest(options.encoder, ENCODER_PRESETS)}"
        )
    if not parts.recognise("whisper", path):
        raise UserError(f"--encoder {path} is no Whisper: give OpenAI's .pt file or a Hugging Face folder of one")
    encoder = read_whisper(path)
    if options.encoder_window is not None:
        encoder = shorten_window(encoder, options.encoder_window)
    assert isinstance(encoder.config, WhisperConfig)
    return replace(encoder, config=replace(encoder.config, mode=options.encoder_mode or encoder.config.mode))


def compare_frames(source: Path, target: Path, options: ConvertOptions) -> str:
    """A line with |a - b| / |b| of the written encoder's frames a and of those b in the Whisper's own window, of the question
    that ships with the package; "" without a Whisper, or where it hears as it was trained."""
    path = source if options.into is not None else None if options.encoder in ENCODER_PRESETS else options.encoder
    if path is None:
        return ""
    whisper, model = read_whisper(Path(path)), streamed.read(target)
    assert isinstance(whisper.config, WhisperConfig) and isinstance(model.config, ModelConfig)
    config = model.config.encoder
    if (config.fixed_length, config.window_seconds) == (True, whisper.config.window_seconds):
        return ""
    sound = read_audio(find_question(QUESTION), SAMPLE_RATE)[: min(config.max_samples, whisper.config.max_samples)]
    ours, theirs = (load_encoder(weights).encode([sound])[0] for weights in (model, whisper))
    theirs = theirs[: len(ours)]
    error = float((ours[: len(theirs)] - theirs).norm() / theirs.norm())
    return (
        f"encoder: frames differ by {error:.2f} from those in Whisper's window of {whisper.config.window_seconds:g} s "
        f"(relative, of {len(sound) / SAMPLE_RATE:.1f} s of speech)"
    )


def _typed(model: Foreign, options: ConvertOptions) -> Foreign:
    """The model with its weights cast to `--dtype`; as it is where none is given."""
    return replace(model, tensors=cast(model.tensors, getattr(torch, options.dtype))) if options.dtype else model
