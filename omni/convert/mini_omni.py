"""Reads and writes checkpoints of mini-omni, and reads mini-omni2's: `lit_model.pth`, `model_config.yaml`, `tokenizer.json`.

Their code has its ids and their order built in (`inference.py`, `utils/snac_utils.py`), so the layout is the preset
`mini-omni` and nothing else. The encoder is a separate Whisper: `small.pt` beside the weights (as in mini-omni2), or a
file that is named.

Sources: gpt-omni/mini-omni @ 26c31d5, `inference.py` (`load_model`); gpt-omni/mini-omni2 @ 6efd5bf, `litgpt/model.py` (its
vision adapter). The tensors are split and joined by `litgpt.py`, the settings read and written by `mini_omni_config.py`.

`.pth` files are written by `torch.save`; their tensors are whole in memory meanwhile, mapped where they are stored as they are.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, BinaryIO

import torch
import yaml

from omni.checkpoint.places import TOKENIZER
from omni.checkpoint.tensors import FileStamp, finite, read_json, read_torch, state_of, write_file
from omni.config import ModelConfig
from omni.convert import whisper as whisper_weights
from omni.convert.contract import Foreign, check_tokenizer, kept_files, match, one_dtype
from omni.convert.grow import fresh
from omni.convert.lazy import Lazy, WriteCallback, cast
from omni.convert.litgpt import (
    AUDIO_EMBEDDING,
    AUDIO_HEAD,
    THEIR_EMBEDDING,
    THEIR_HEAD,
    join,
    our_shapes,
    same,
    split,
    their_shapes,
)
from omni.convert.mini_omni_config import check_fits, model_config, read_settings, their_settings
from omni.convert.tokenizers import COMPANIONS, WORDS, read_tokenizer
from omni.encoder.whisper import WhisperEncoder
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.files import replacing_folder

WEIGHTS, SETTINGS, WHISPER = "lit_model.pth", "model_config.yaml", "small.pt"

VISION = "vision_adapter."
POST = "transformer.post_adapter."


# --- in ---------------------------------------------------------------------------------------------------------------


def recognise(path: Path) -> bool:
    """Whether this is a litgpt folder (`read` says why one is not mini-omni's)."""
    return (path / WEIGHTS).is_file() or (path / SETTINGS).is_file()


def read(
    path: Path,
    *,
    encoder: Foreign | WhisperConfig | None = None,
    tokenizer: Path | None = None,
    drop_vision: bool = False,
) -> Foreign:
    """Reads the whole model of a checkpoint of mini-omni or mini-omni2.

    Where parts have different types, all become the smallest that holds each exactly (a Whisper is float16 on the disk).

    Args:
        encoder: a Whisper's weights, or a size whose weights are drawn, instead of the folder's `small.pt`.
        tokenizer: another tokenizer.json than the folder's.
        drop_vision: drop the vision adapter of a mini-omni2; the rest hears and speaks as before.

    Raises:
        UserError: a setting that our decoder does not have, a tensor that is missing, extra, or does not fit, a pickle that
            asks for more than tensors, another model's tokenizer, or no Whisper.
    """
    settings = read_settings(path / SETTINGS)
    found = state_of(read_torch(path / WEIGHTS), path / WEIGHTS)
    seen = sorted(name for name in found if name.startswith(VISION))
    if seen and not drop_vision:
        raise UserError(
            f"{path / WEIGHTS}: tensor {seen[0]} belongs to a mini-omni2, which sees; there is no place for it here: keep the "
            "speech model alone with --drop_vision"
        )
    heard = encoder if encoder is not None else _whisper(path)
    config = model_config(settings, path / SETTINGS, heard.config if isinstance(heard, Foreign) else heard, post=_post(found))
    shapes = their_shapes(config)
    theirs = match(found, {name: name for name in shapes}, shapes, path / WEIGHTS, lambda name: name.startswith(VISION))
    if config.decoder.tie_text and not same(theirs[THEIR_EMBEDDING], theirs[THEIR_HEAD]):
        raise UserError(
            f"{path / WEIGHTS}: tensor {THEIR_HEAD} differs from {THEIR_EMBEDDING}, but {SETTINGS} ties them; set "
            "tie_word_embeddings to false there if the head was trained apart"
        )
    tensors, names = split(theirs, config)
    if isinstance(heard, Foreign):
        tensors |= heard.tensors
        names |= heard.names
    else:
        tensors |= fresh(WhisperEncoder, (heard,), "encoder.", 0, next(iter(tensors.values())).dtype)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    kept = {name: read_json(path / name) for name in COMPANIONS if (path / name).is_file()}
    if kept.get(WORDS, {}).get("add_bos_token"):
        raise UserError(
            f"{path / WORDS}: add_bos_token is true: texts then start with a token that mini-omni's have not; is it another "
            "model's?"
        )
    rows = config.layout.text.size
    words = read_tokenizer(tokenizer or path / TOKENIZER, rows, path, kept, named=tokenizer is not None)
    extra = {"mini-omni": {SETTINGS: settings, **kept}}
    return Foreign("mini-omni", path, config, cast(tensors, dtype), words, names, extra)


def _post(found: Mapping[str, Lazy]) -> bool:
    return any(name.startswith(POST) for name in found)


def _whisper(path: Path) -> Foreign:
    if not (path / WHISPER).is_file():
        raise UserError(
            f"{path} has no {WHISPER}, and mini-omni's encoder is Whisper small: give OpenAI's {WHISPER} (or a Hugging Face "
            "folder of it) with --encoder"
        )
    return whisper_weights.read(path / WHISPER)


# --- out --------------------------------------------------------------------------------------------------------------


def write(source: Foreign, target: Path, on_progress: WriteCallback | None = None) -> dict[str, FileStamp]:
    """Write a whole model as a folder of mini-omni's, with the encoder as `small.pt`.

    That file is one that openai-whisper loads, with a text decoder of no layers (theirs never runs it); the first mini-omni
    fetches Whisper small itself, so an encoder that was trained further must be handed to it. An alignment head, which only
    training uses, is left out.

    Returns:
        size and CRC-32 of each file.

    Raises:
        UserError: the model has a part that mini-omni lacks, its types are mixed, or the place cannot be written.
    """
    config = source.config
    if not isinstance(config, ModelConfig) or source.tokenizer is None:
        raise UserError(f"{source.place} is no whole speech model with a tokenizer; only one can be written as a mini-omni")
    check_fits(config, source.place)
    check_tokenizer(source.tokenizer, config.layout.text.size, source.place)
    one_dtype(source)
    shapes = our_shapes(config)
    tensors = match(source.tensors, {n: n for n in shapes}, shapes, source.place, lambda name: name not in shapes)
    weights = join(tensors, config)
    kept = kept_files(source, "mini-omni")
    tied = config.decoder.tie_text and not config.decoder.post_layers and same(tensors[AUDIO_EMBEDDING], tensors[AUDIO_HEAD])
    settings = their_settings(config, tied, kept.get(SETTINGS, {}))
    assert isinstance(config.encoder, WhisperConfig)  # `check_fits` refuses others
    whisper = _openai(source, config.encoder)
    total = sum(t.nbytes for t in (*weights.values(), *whisper.values()))
    progress = WriteProgress(total, on_progress)
    with replacing_folder(target, total) as folder:
        files = {WEIGHTS: _save(folder / WEIGHTS, weights, lambda state: state, progress)}
        dims = _dims(config.encoder)
        files[WHISPER] = _save(folder / WHISPER, whisper, lambda s: {"dims": dims, "model_state_dict": s}, progress)
        files[SETTINGS] = write_file(folder / SETTINGS, yaml.safe_dump(settings).encode())
        files[TOKENIZER] = write_file(folder / TOKENIZER, source.tokenizer.inner.to_str(pretty=True).encode())
        for name in COMPANIONS:
            if name in kept:
                files[name] = write_file(folder / name, (json.dumps(kept[name], indent=2, ensure_ascii=False) + "\n").encode())
    return files


def _openai(source: Foreign, encoder: WhisperConfig) -> dict[str, Lazy]:
    """The encoder under OpenAI's names, and the tensors of a text decoder of width 1 and no layers."""
    shapes = whisper_weights.encoder_shapes(encoder)
    tensors = match(source.tensors, {n: n for n in shapes}, shapes, source.place, lambda name: name not in shapes)
    out = {name.replace("encoder.whisper.", "encoder."): tensor for name, tensor in tensors.items()}
    dtype = next(iter(tensors.values())).dtype
    empty = {"token_embedding.weight": (1, 1), "positional_embedding": (1, 1), "ln.weight": (1,), "ln.bias": (1,)}
    return out | {f"decoder.{name}": Lazy.filled(shape, dtype) for name, shape in empty.items()}


def _dims(encoder: WhisperConfig) -> dict[str, int]:
    """`ModelDimensions` of openai-whisper (`whisper/model.py`)."""
    heard = {"n_mels": encoder.n_mels, "n_audio_ctx": encoder.positions, "n_audio_state": encoder.width}
    layers = {"n_audio_head": encoder.heads, "n_audio_layer": encoder.layers}
    return heard | layers | {"n_vocab": 1, "n_text_ctx": 1, "n_text_state": 1, "n_text_head": 1, "n_text_layer": 0}


class WriteProgress:
    """Counts the bytes written over several files, for one progress callback."""

    def __init__(self, total: int, on_progress: WriteCallback | None) -> None:
        self.total, self.on_progress, self.done = total, on_progress, 0

    def add(self, count: int) -> None:
        self.done = min(self.done + count, self.total)  # headers come on top of the tensors
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


def _save(path: Path, tensors: Mapping[str, Lazy], wrap: Callable[[dict[str, Any]], Any], progress: WriteProgress) -> FileStamp:
    with path.open("wb") as handle:
        written = write_archive(handle, tensors, wrap, progress.add)
        handle.flush()
        os.fsync(handle.fileno())
    return written


class _Out(io.RawIOBase):
    """A file that is written sequentially; computes its size and CRC-32 meanwhile."""

    def __init__(self, handle: BinaryIO, on_write: Callable[[int], None]) -> None:
        self.handle, self.on_write = handle, on_write
        self.bytes = self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.handle.write(view)
        self.crc32, self.bytes = zlib.crc32(view, self.crc32), self.bytes + len(view)
        self.on_write(len(view))
        return len(view)


def write_archive(
    handle: BinaryIO, tensors: Mapping[str, Lazy], wrap: Callable[[dict[str, Any]], Any], on_write: Callable[[int], None]
) -> FileStamp:
    """Write `wrap(tensors)` with `torch.save`.

    Args:
        wrap: makes the object to pickle from a mapping of names to tensors.
        on_write: called with the number of bytes of each piece.

    Raises:
        OSError: from the file system.
    """
    out: Any = _Out(handle, on_write)
    whole = {name: tensor().contiguous() for name, tensor in tensors.items()}
    whole = {name: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for name, t in whole.items()}
    torch.save(wrap(whole), out)
    return FileStamp(out.bytes, out.crc32, tuple(name for name, tensor in whole.items() if not finite(tensor)))
