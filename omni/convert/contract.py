"""The interface of checkpoint formats: an external checkpoint as lazily read tensors under our names, with its tokenizer.

A checkpoint that is imported or exported is a `Foreign`: a configuration of ours and a mapping from the names of our
`state_dict` to `Lazy` tensors. A `Lazy` knows shape and type and reads rows when asked, so tables are split, joined, grown and
converted without holding any of them whole in memory.

A format is a module that offers (see `train/convert/convert.py`, which lists them):

    recognise(path) -> bool            cheap: looks at names of files and at config.json, reads no weights
    read(path) -> Foreign              opens the files; everything that does not fit is a `UserError` naming the tensor
    write(source, target, on_progress)       optional: writes a whole model (`source.config` is a `ModelConfig`) as their files

The type of `Foreign.config` determines the contents of `tensors`:

    ModelConfig      a whole model: every name of `SpeechModel(config).state_dict()`
    TextConfig       a language model: `decoder.text_embedding.weight`, `decoder.blocks.*`, `decoder.norm.weight` and, where
                     it is not tied, `decoder.text_head.weight`; tables have the original vocabulary's rows
    WhisperConfig    a speech encoder: `encoder.*`
    CodecConfig      a codec: its own names, as `omni.codec` reads them

A reader makes a table of our names to theirs, then `match` gives the tensors and refuses any that are missing, left over or of
another shape or type. Tables that the other format joins are split by `Lazy.rows`, and joined again by `joined`.

`read_tokenizer` refuses a tokenizer that, by the other files, belongs to another model: `tokenizer_config.json`
(`added_tokens_decoder`, `eos_token`), `config.json` and `generation_config.json` (`eos_token_id`) as transformers writes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt
from torch import nn

from omni.checkpoint.places import CONFIG, TOKENIZER
from omni.checkpoint.tensors import FileStamp, write_file
from omni.config import DecoderConfig, ModelConfig
from omni.convert.lazy import FLOATS, Lazy, type_name
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.layout import ChatFormat, Layout
from omni.model.decoder import Decoder
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from omni.utils.configuration import configuration


@configuration
class TextConfig:
    """Configuration of a language model without sound: the decoder, the rows of its table, its chat format, and the id that
    ends its answers."""

    decoder: DecoderConfig
    size: PositiveInt
    chat: ChatFormat | None = None
    end: int | None = None


@dataclass(frozen=True)
class CodecConfig:
    """A codec's name in our registry, and its `config.json`."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Foreign:
    """An external checkpoint: its config and lazily read tensors. See the top of this module.

    Attributes:
        format: its name.
        path: the file or folder, for messages.
        names: our names to theirs, for messages.
        extra: plain data to keep (stored under `extra` of our `config.json`, and written again on export).
        codec_folder: folder of the codec's weights beside the model's.
    """

    format: str
    path: Path
    config: ModelConfig | TextConfig | WhisperConfig | CodecConfig
    tensors: Mapping[str, Lazy]
    tokenizer: Tokenizer | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    codec_folder: Path | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def kept_files(source: Foreign, format_name: str) -> dict[str, dict[str, Any]]:
    """The format's JSON files that were kept in `extra` when the model was imported; UserError where they are no objects."""
    kept = source.extra.get(format_name, {})
    if not isinstance(kept, dict) or not all(isinstance(data, dict) for data in kept.values()):
        raise UserError(
            f"{source.path}: extra: {format_name} is {kept!r}; it must hold files as objects; fetch or save the folder again"
        )
    return kept


# --- refusing what does not fit -----------------------------------------------------------------------------------------


def match(
    tensors: Mapping[str, Lazy],
    names: Mapping[str, str],
    shapes: Mapping[str, Sequence[int]],
    where: str | Path,
    ignore: Callable[[str], bool] = lambda name: False,
) -> dict[str, Lazy]:
    """Renames another project's tensors to our names and checks that they are complete. UserError: the first tensor that is
    missing, of another shape, no floating-point weights, or not known.

    Args:
        tensors: those of the files, under their names.
        names: our name to theirs.
        shapes: our name to the shape it must have.
        ignore: whether a name of theirs is known and not needed.
    """
    for ours, theirs in names.items():
        if theirs not in tensors:
            close = get_close_matches(theirs, [n for n in tensors if n not in set(names.values())], n=1, cutoff=0.8)
            hint = f"; there is {close[0]}, which the configuration does not ask for" if close else ""
            raise UserError(f"{where}: tensor {theirs} is missing{hint}; fetch the files again, or fix config.json")
        if tensors[theirs].shape != tuple(shapes[ours]):
            raise UserError(
                f"{where}: tensor {theirs} has shape {list(tensors[theirs].shape)}, the configuration asks for "
                f"{list(shapes[ours])}; are the weights and config.json of one model?"
            )
        check_float(theirs, tensors[theirs], where)
    known = set(names.values())
    for theirs in tensors:
        if theirs not in known and not ignore(theirs):
            raise UserError(
                f"{where}: tensor {theirs} {list(tensors[theirs].shape)} has no place in this model, and nothing is dropped "
                "silently: are the weights and config.json of one model?"
            )
    return {ours: tensors[theirs] for ours, theirs in names.items()}


def check_float(name: str, tensor: Lazy, where: str | Path) -> None:
    """Refuse a tensor whose type is not plain floating point (UserError)."""
    if tensor.dtype not in FLOATS:
        known = ", ".join(map(type_name, FLOATS))
        raise UserError(
            f"{where}: tensor {name} is {type_name(tensor.dtype)}; weights must be one of {known} (not quantised: fetch the "
            "original model)"
        )


def whole_number(settings: Mapping[str, Any], key: str, where: str | Path, least: int = 1) -> int:
    """The number under a key of another project's settings; UserError where it is no whole number, or too small."""
    value = settings.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{where}: {key} is {value!r}; it must be a whole number from {least} on; fetch the file again")
    return value


def one_dtype(source: Foreign) -> torch.dtype:
    """The common type of all tensors; UserError naming the first that differs from most."""
    most = Counter(tensor.dtype for tensor in source.tensors.values()).most_common(1)[0][0]
    for name, tensor in source.tensors.items():
        if tensor.dtype != most:
            raise UserError(
                f"{source.path}: tensor {source.names.get(name, name)} is {type_name(tensor.dtype)} and most others are "
                f"{type_name(most)}; give --dtype {type_name(most)} (or another) to bring all to one"
            )
    return most


def check_tokenizer(tokenizer: Tokenizer, size: int, where: str | Path) -> None:
    """Refuse a tokenizer with ids beyond the text table (UserError naming the token)."""
    vocabulary = tokenizer.inner.get_vocab(with_added_tokens=True)
    token = max(vocabulary, key=lambda t: vocabulary[t], default=None)
    if token is not None and vocabulary[token] >= size:
        raise UserError(
            f"{where}: token {token!r} has id {vocabulary[token]}, but the model's table has {size} rows; is it another "
            "model's tokenizer?"
        )


def renamed(name: str, table: Sequence[tuple[str, str]], back: bool = False) -> str:
    """The other project's name of one of our tensors, by a table of parts of names, ours first; with `back`, ours of theirs."""
    for ours, theirs in table:
        name = name.replace(theirs, ours) if back else name.replace(ours, theirs)
    return name


def shapes_of(make: Callable[[], nn.Module], prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Names, after a prefix, and shapes of a module's tensors; the module is made without memory."""
    with torch.device("meta"):
        return {f"{prefix}{name}": tuple(tensor.shape) for name, tensor in make().state_dict().items()}


@lru_cache(4)
def text_shapes(text: TextConfig) -> Mapping[str, tuple[int, ...]]:
    """Our names and shapes of a language model's tensors (see `TextConfig`)."""
    shapes = shapes_of(lambda: Decoder(text.decoder, Layout.build([1], text.size)))
    for table in {"text_embedding.weight", "text_head.weight"} & shapes.keys():
        shapes[table] = (text.size, *shapes[table][1:])
    return {f"decoder.{name}": shape for name, shape in shapes.items() if not name.startswith(("audio_", "post_"))}


@lru_cache(4)
def model_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of a whole model's tensors."""
    return shapes_of(lambda: SpeechModel(config))


def whole_model(source: Foreign, form: str) -> tuple[ModelConfig, Tokenizer]:
    """Configuration and tokenizer of a whole model; UserError where it is none, and cannot be written as `form`."""
    if not isinstance(source.config, ModelConfig) or source.tokenizer is None:
        raise UserError(f"{source.path} is no whole speech model with a tokenizer; it cannot be written as {form}")
    return source.config, source.tokenizer


def write_texts(folder: Path, tokenizer: Tokenizer, files: Mapping[str, Any]) -> dict[str, FileStamp]:
    """Write a tokenizer, and JSON files by name, into an existing folder."""
    stamps = {TOKENIZER: write_file(folder / TOKENIZER, tokenizer.inner.to_str(pretty=True).encode())}
    for name, data in files.items():
        stamps[name] = write_file(folder / name, (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode())
    return stamps


WORDS, GENERATION = "tokenizer_config.json", "generation_config.json"

COMPANIONS = (GENERATION, WORDS, "special_tokens_map.json")
"""Small files that are kept with an imported model (under `extra`) and written again on export."""

SPARE_ROWS, SPARE_SHARE = 1024, 20
"""Rows of a table that may be without a token: this number, or a twentieth of the table.

Tables are filled up to multiples of 64 to 1,024 (128 for each of eight devices; Qwen2.5 leaves 271 or 399 of about 152,000
empty), and a few families keep some for later (DeepSeek's Llamas 2,385 of 102,400). Other families' tokenizers are further
away: Llama 3's leaves 16 % of Qwen2.5's table, Mistral's 78 %.
"""


def read_tokenizer(
    path: Path, size: int, folder: Path, files: Mapping[str, Mapping[str, Any]], *, named: bool = False
) -> Tokenizer:
    """The tokenizer of a model whose text table has `size` rows. UserError: the file is missing or broken, or it is another
    model's by what the other files say.

    Args:
        path: a tokenizer.json.
        folder: the model's, for messages.
        files: its `config.json` and `COMPANIONS`, those that exist.
        named: the user has named this file explicitly; it may then leave most of the table unused.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; give the model's tokenizer.json with --tokenizer")
    words = Tokenizer.from_file(path)
    check_tokenizer(words, size, path)
    spare = size - len(words)
    if spare > max(SPARE_ROWS, size // SPARE_SHARE) and not named:
        raise UserError(
            f"{path} has {len(words)} tokens, and the model's table {size} rows, {spare} of which would never be used; is it "
            "another model's tokenizer? Where it is the right one all the same, name it with --tokenizer"
        )
    tokens = {number: token for token, number in words.inner.get_vocab(with_added_tokens=True).items()}
    _check_added(tokens, path, folder / WORDS, files.get(WORDS, {}))
    _check_end(tokens, path, folder, files)
    return words


def _check_added(tokens: Mapping[int, str], path: Path, where: Path, said: Mapping[str, Any]) -> None:
    """UserError for an added token that the tokenizer lacks or has under another id."""
    added = said.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(number.isascii() and number.isdigit() for number in added):
        raise UserError(f"{where}: added_tokens_decoder does not go from ids to tokens; fetch the file again")
    for number, token in added.items():
        content, actual = _content(token, where, "added_tokens_decoder"), tokens.get(int(number))
        if actual != content:
            other = "has none" if actual is None else f"calls it {actual!r}"
            raise UserError(
                f"{where} calls token {number} {content!r}, and {path} {other}: they are of two models; fetch both again"
            )


def _check_end(tokens: Mapping[int, str], path: Path, folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """UserError where the files do not agree on the token of the end."""
    settings, token = _ids(files.get(CONFIG, {}).get("eos_token_id")), files.get(WORDS, {}).get("eos_token")
    lacking = next((number for number in settings if number not in tokens), None)
    if lacking is not None:
        raise UserError(f"{path} has no token {lacking}, which {CONFIG} calls the end (eos_token_id); it is another model's")
    if token is None:
        return
    content, where = _content(token, folder / WORDS, "eos_token"), f"{folder / WORDS}"
    named = {number for number, text in tokens.items() if text == content}
    if not named:
        raise UserError(
            f"{where} calls {content!r} the end (eos_token), and {path} has no such token: they are of two models; fetch "
            "both again"
        )
    # A model that was fine-tuned often names its end tokens in generation_config.json alone.
    if settings and not named & {*settings, *_ids(files.get(GENERATION, {}).get("eos_token_id"))}:
        shown = ", ".join(f"{number} ({tokens.get(number)!r})" for number in settings)
        raise UserError(
            f"{where} calls {content!r} the end (eos_token), token {min(named)} of {path}, and {folder / CONFIG} has "
            f"eos_token_id {shown}: are they of one model? Fetch both again, or fix the one that is wrong"
        )


def _content(token: Any, where: Path, key: str) -> str:
    """The text of a token, which is stored as a string or as `{"content": ...}`."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise UserError(f"{where}: {key} holds {token!r}, which is no token; fetch the file again")
    return content


def _ids(value: Any) -> list[int]:
    """One id, several, or none."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and not isinstance(i, bool)]
