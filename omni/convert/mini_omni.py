"""Reads and writes checkpoints of mini-omni, and reads mini-omni2's: `lit_model.pth`, `model_config.yaml`, `tokenizer.json`.

Their code has its ids and their order built in (`inference.py`, `utils/snac_utils.py`), so the layout is the preset
`mini-omni` and nothing else. The encoder is a separate Whisper: `small.pt` beside the weights (as in mini-omni2), or a
file that is named. The settings are read and written by `mini_omni_config.py`.

Theirs (a copy of litgpt) join tensors that are separate here: queries, keys and values of a block in one matrix, grouped by
key/value head; text and audio ids in one table and in one head. One table, `pieces`, lists the rows of ours that make each
tensor of theirs; reading and writing both follow it, so that they are inverse to each other.

Sources: gpt-omni/mini-omni @ 26c31d5, `inference.py` (`load_model`), `litgpt/model.py` (`GPT`, `CausalSelfAttention.forward`,
`whisperMLP`); gpt-omni/mini-omni2 @ 6efd5bf, `litgpt/model.py` (its vision adapter).

`.pth` files are written by `torch.save`; their tensors are whole in memory meanwhile, mapped where they are stored as they are.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, BinaryIO

import torch
import yaml

from omni.checkpoint.places import TOKENIZER
from omni.checkpoint.tensors import FileStamp, finite, read_torch, state_of, write_file
from omni.config import ModelConfig
from omni.convert.contract import (
    COMPANIONS,
    WORDS,
    Foreign,
    check_tokenizer,
    kept_files,
    match,
    model_shapes,
    one_dtype,
    read_tokenizer,
    renamed,
    whole_model,
    write_texts,
)
from omni.convert.grow import AUDIO_EMBEDDING, AUDIO_HEAD, fresh
from omni.convert.huggingface import EMBEDDING, HEAD
from omni.convert.lazy import Lazy, Progress, WriteCallback, cast, joined, same
from omni.convert.mini_omni_config import check_fits, model_config, read_settings, their_settings
from omni.convert.parts import encoder_shapes, read_whisper
from omni.encoder.whisper import WhisperEncoder
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.files import read_json, replacing_folder

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
    UserError: a setting that our decoder does not have, a tensor that is missing, extra, or does not fit, a pickle that asks
    for more than tensors, another model's tokenizer, or no Whisper.

    Args:
        encoder: a Whisper's weights, or a size whose weights are drawn, instead of the folder's `small.pt`.
        tokenizer: another tokenizer.json than the folder's.
        drop_vision: drop the vision adapter of a mini-omni2; the rest hears and speaks as before.
    """
    settings = read_settings(path / SETTINGS)
    state = state_of(read_torch(path / WEIGHTS), path / WEIGHTS)
    seen = sorted(name for name in state if name.startswith(VISION))
    if seen and not drop_vision:
        raise UserError(
            f"{path / WEIGHTS}: tensor {seen[0]} belongs to a mini-omni2, which sees; there is no place for it here: keep the "
            "speech model alone with --drop_vision"
        )
    heard = encoder if encoder is not None else _whisper(path)
    size, post = heard.config if isinstance(heard, Foreign) else heard, any(name.startswith(POST) for name in state)
    config = model_config(settings, path / SETTINGS, size, post)
    shapes = their_shapes(config)
    theirs = match(state, {name: name for name in shapes}, shapes, path / WEIGHTS, lambda name: name.startswith(VISION))
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


def _whisper(path: Path) -> Foreign:
    if not (path / WHISPER).is_file():
        raise UserError(
            f"{path} has no {WHISPER}, and mini-omni's encoder is Whisper small: give OpenAI's {WHISPER} (or a Hugging Face "
            "folder of it) with --encoder"
        )
    return read_whisper(path / WHISPER)


# --- out --------------------------------------------------------------------------------------------------------------


def write(source: Foreign, target: Path, on_progress: WriteCallback | None = None) -> dict[str, FileStamp]:
    """Write a whole model as a folder of mini-omni's, with the encoder as `small.pt`.

    That file is one that openai-whisper loads, with a text decoder of no layers (theirs never runs it); the first mini-omni
    fetches Whisper small itself, so an encoder that was trained further must be handed to it. An alignment head, which only
    training uses, is left out. Returns size and CRC-32 of each file. UserError: the model has a part that mini-omni lacks,
    its types are mixed, or the place cannot be written."""
    config, tokenizer = whole_model(source, "a mini-omni")
    check_fits(config, source.path)
    check_tokenizer(tokenizer, config.layout.text.size, source.path)
    one_dtype(source)
    shapes = our_shapes(config)
    tensors = match(source.tensors, {n: n for n in shapes}, shapes, source.path, lambda name: name not in shapes)
    weights = join(tensors, config)
    kept = kept_files(source, "mini-omni")
    tied = config.decoder.tie_text and not config.decoder.post_layers and same(tensors[AUDIO_EMBEDDING], tensors[AUDIO_HEAD])
    settings = their_settings(config, tied, kept.get(SETTINGS, {}))
    assert isinstance(config.encoder, WhisperConfig)  # `check_fits` refuses others
    whisper = _openai(source, config.encoder)
    total = sum(t.nbytes for t in (*weights.values(), *whisper.values()))
    progress = Progress(total, on_progress)
    with replacing_folder(target, total) as folder:
        files = {WEIGHTS: _save(folder / WEIGHTS, weights, lambda state: state, progress)}
        dims = _dims(config.encoder)
        files[WHISPER] = _save(folder / WHISPER, whisper, lambda s: {"dims": dims, "model_state_dict": s}, progress)
        files[SETTINGS] = write_file(folder / SETTINGS, yaml.safe_dump(settings).encode())
        files |= write_texts(folder, tokenizer, {name: kept[name] for name in COMPANIONS if name in kept})
    return files


def _openai(source: Foreign, encoder: WhisperConfig) -> dict[str, Lazy]:
    """The encoder under OpenAI's names, and the tensors of a text decoder of width 1 and no layers."""
    shapes = encoder_shapes(encoder)
    tensors = match(source.tensors, {n: n for n in shapes}, shapes, source.path, lambda name: name not in shapes)
    out = {name.replace("encoder.whisper.", "encoder."): tensor for name, tensor in tensors.items()}
    dtype = next(iter(tensors.values())).dtype
    empty = {"token_embedding.weight": (1, 1), "positional_embedding": (1, 1), "ln.weight": (1,), "ln.bias": (1,)}
    return out | {f"decoder.{name}": Lazy.filled(shape, dtype) for name, shape in empty.items()}


def _dims(encoder: WhisperConfig) -> dict[str, int]:
    """`ModelDimensions` of openai-whisper (`whisper/model.py`)."""
    heard = {"n_mels": encoder.n_mels, "n_audio_ctx": encoder.positions, "n_audio_state": encoder.width}
    layers = {"n_audio_head": encoder.heads, "n_audio_layer": encoder.layers}
    return heard | layers | {"n_vocab": 1, "n_text_ctx": 1, "n_text_state": 1, "n_text_head": 1, "n_text_layer": 0}


def _save(path: Path, tensors: Mapping[str, Lazy], wrap: Callable[[dict[str, Any]], Any], progress: Progress) -> FileStamp:
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
    """Write `wrap(tensors)` with `torch.save`. OSError: from the file system.

    Args:
        wrap: makes the object to pickle from a mapping of names to tensors.
        on_write: called with the number of bytes of each piece.
    """
    out: Any = _Out(handle, on_write)
    whole = {name: tensor().contiguous() for name, tensor in tensors.items()}
    whole = {name: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for name, t in whole.items()}
    torch.save(wrap(whole), out)
    return FileStamp(out.bytes, out.crc32, tuple(name for name, tensor in whole.items() if not finite(tensor)))


THEIR_EMBEDDING, THEIR_HEAD = "transformer.wte.weight", "lm_head.weight"
THEIR_AUDIO_HEAD = "transformer.post_adapter_audio_lm_head.weight"

TABLES = (EMBEDDING, AUDIO_EMBEDDING, HEAD, AUDIO_HEAD)

Piece = tuple[str | None, int]
"""Name of one of our tensors and the number of its next rows; None for rows that theirs has and never reads."""


def pieces(config: ModelConfig) -> dict[str, list[Piece]]:
    """The pieces of ours that make each tensor of theirs, from the first row to the last. A joined tensor has the name that the
    table gives its first part."""
    shapes = our_shapes(config)
    decoder = config.decoder
    size, group = decoder.head_size, decoder.heads // decoder.kv_heads
    out: dict[str, list[Piece]] = {}
    for name, shape in shapes.items():
        if name in TABLES or ".attention.k." in name or ".attention.v." in name:
            continue
        if ".attention.q." in name:
            key, value = name.replace(".q.", ".k."), name.replace(".q.", ".v.")
            out[renamed(name, _RENAMED)] = [(name, group * size), (key, size), (value, size)] * decoder.kv_heads
        else:
            out[renamed(name, _RENAMED)] = [(name, shape[0])]
    text, audio = shapes[EMBEDDING][0], shapes[AUDIO_EMBEDDING][0]
    out[THEIR_EMBEDDING] = [(EMBEDDING, text), (AUDIO_EMBEDDING, audio)]
    head = EMBEDDING if decoder.tie_text else HEAD
    if decoder.post_layers:
        out[THEIR_HEAD] = [(head, text), (None, audio)]
        out[THEIR_AUDIO_HEAD] = [(AUDIO_HEAD, audio)]
    else:
        out[THEIR_HEAD] = [(head, text), (AUDIO_HEAD, audio)]
    return out


def their_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of their tensors."""
    shapes = our_shapes(config)
    return {theirs: (sum(rows for _, rows in made), *shapes[str(made[0][0])][1:]) for theirs, made in pieces(config).items()}


def split(tensors: Mapping[str, Lazy], config: ModelConfig) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Split their tensors into decoder and projector under our names; also returns the names of the tensors they come from.
    `tensors`: of the shapes that `their_shapes` asks for."""
    parts: dict[str, list[Lazy]] = {}
    names: dict[str, str] = {}
    for theirs, made in pieces(config).items():
        start = 0
        for name, rows in made:
            if name is not None and names.setdefault(name, theirs) == theirs:  # a tied head comes from the embedding
                parts.setdefault(name, []).append(tensors[theirs].rows(start, start + rows))
            start += rows
    return {name: joined(part) for name, part in parts.items()}, names


def join(tensors: Mapping[str, Lazy], config: ModelConfig) -> dict[str, Lazy]:
    """Join our tensors to theirs; rows that theirs never reads are zero."""
    out = {}
    for theirs, made in pieces(config).items():
        width, dtype = tensors[str(made[0][0])].shape[1:], tensors[str(made[0][0])].dtype
        done: dict[str, int] = {}
        parts = []
        for name, rows in made:
            if name is None:
                parts.append(Lazy.filled((rows, *width), dtype))
                continue
            start = done.get(name, 0)
            parts.append(tensors[name].rows(start, start + rows))
            done[name] = start + rows
        out[theirs] = joined(parts)
    return out


def our_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the part of our model that their file holds: decoder and projector."""
    return {name: shape for name, shape in model_shapes(config).items() if name.startswith(("decoder.", "projector."))}


_RENAMED = (
    ("decoder.norm.", "transformer.ln_f."),
    ("decoder.post_norm.", "transformer.post_adapter_audio_ln."),
    ("decoder.blocks.", "transformer.h."),
    ("decoder.post_blocks.", "transformer.post_adapter."),
    (".attention_norm.", ".norm_1."),
    (".mlp_norm.", ".norm_2."),
    (".attention.q.", ".attn.attn."),
    (".attention.out.", ".attn.proj."),
    ("projector.project.", "whisper_adapter."),
    (".gate.", ".fc_1."),
    (".up.", ".fc_2."),
    (".down.", ".proj."),
)
