"""Opens our own model folders (`omni.checkpoint.folder`) without reading their weights, and writes them without holding the
weights, also in int8 (`omni.checkpoint.folder`), a piece at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from omni.checkpoint.folder import (
    FolderConfig,
    Quantized,
    check_files,
    check_full_precision,
    check_sum,
    int8_tensors,
    read_config,
    read_stored,
    save_folder,
)
from omni.checkpoint.places import ADAPTERS, CODEC, CONFIG, TOKENIZER, WEIGHTS
from omni.checkpoint.tensors import PT, FileStamp, copy_file, not_finite, read_pieces, read_safetensors, save_tensors
from omni.convert.contract import Foreign, check_tokenizer, match, model_shapes, whole_model
from omni.convert.lazy import Lazy, LazyTensors, Progress, WriteCallback
from omni.convert.parts import check_codec, fill_codec
from omni.errors import UserError
from omni.files import read_json, replacing_folder
from omni.text import Tokenizer


def recognise(path: Path) -> bool:
    """Whether this is a folder of ours."""
    if not (path / CONFIG).is_file():
        return False
    data = read_json(path / CONFIG)
    return "format" in data and "model" in data


def read(path: Path) -> Foreign:
    """Open a model folder; UserError where a file is missing, truncated, or does not fit the configuration. The checksum of the
    weights is not computed here (that would read them twice); every size is compared."""
    check_full_precision(path, "converting")
    stored, config = read_stored(path), read_config(path)
    check_files(path)
    shapes = model_shapes(config)
    tensors = match(read_safetensors(path / WEIGHTS), {name: name for name in shapes}, shapes, path / WEIGHTS)
    codec = path / CODEC if (path / CODEC).is_dir() else None
    return Foreign("omni", path, config, tensors, Tokenizer.from_file(path / TOKENIZER), extra=stored.extra, codec_folder=codec)


def write(
    source: Foreign, target: Path, on_progress: WriteCallback | None = None, *, codec: Foreign | None = None
) -> dict[str, FileStamp]:
    """Write a whole model as a model folder: beside its name, then renamed. Returns size and CRC-32 of each file but
    `config.json`, which holds them. UserError: a tensor is missing or does not fit, the tokenizer has ids beyond the table, or
    the place cannot be written.

    Args:
        source: `config` is a `ModelConfig`, and there is a tokenizer.
        codec: the codec's weights, written under `codec/`; without it, those of `source.codec_folder` are copied.
    """
    config, tokenizer = whole_model(source, "a model folder")
    shapes = model_shapes(config)
    tensors = match(source.tensors, {name: name for name in shapes}, shapes, source.path)
    check_tokenizer(tokenizer, config.layout.text.size, source.path)

    def fill(folder: Path) -> None:
        assert codec is not None
        fill_codec(folder, codec)
        opened = check_codec(codec, folder, config.codec)
        if opened.name != config.codec or tuple(opened.codebook_sizes) != config.layout.codebook_sizes:
            raise UserError(
                f"{codec.path} is {opened.name} with codebooks {tuple(opened.codebook_sizes)}, the model's codec is "
                f"{config.codec} with {config.layout.codebook_sizes}; give the codec that fits"
            )

    return save_folder(
        target, config, LazyTensors(tensors), tokenizer,
        codec_folder=source.codec_folder, write_codec=fill if codec is not None else None, extra=source.extra,
        needed=source.nbytes + (codec.nbytes if codec is not None else 0), on_progress=on_progress,
    )  # fmt: skip


def quantize_folder(source: Path, target: Path, on_progress: WriteCallback | None = None) -> dict[str, FileStamp]:
    """Write the model folder `source` as `target`, beside its name first, then renamed: linears and tables in int8, all else as
    it is, with tokenizer, codec, plain data and adapters. Returns size and CRC-32 of each file that `config.json` lists.
    UserError: the folder is quantised already, damaged or does not fit its configuration, or the place cannot be written.

    Args:
        on_progress: called with the bytes of the weights that were read, and the number that will be: each is read for its
            checksum, and rounded in two readings.
    """
    stored, config = read_stored(source), read_config(source)
    if (held := stored.quantized) is not None:
        raise UserError(
            f"{source} is quantised already ({held.form}); quantise the folder in full precision that it was made from"
        )
    check_files(source)
    check_tokenizer(Tokenizer.from_file(source / TOKENIZER), config.layout.text.size, source)
    progress = Progress(0, on_progress)
    state = {name: _counted(tensor, progress) for name, tensor in read_pieces(source / WEIGHTS).items()}
    tensors, checksums = int8_tensors(config, state, str(source / WEIGHTS))
    readings = sum(t.nbytes * (2 if tensors[name].dtype == torch.int8 else 1) for name, t in state.items())
    progress.total = stored.files[WEIGHTS].bytes + readings
    others = [source / name for name in stored.files if name != WEIGHTS]
    others += [path for path in sorted((source / CODEC).rglob("*")) if path.is_file() and path not in others]
    adapters = [path for path in sorted((source / ADAPTERS).rglob("*")) if path.is_file()]  # of no checksum in `config.json`
    files: dict[str, FileStamp] = {}
    with replacing_folder(target, sum(t.nbytes for t in tensors.values()) + sum(p.stat().st_size for p in others)) as folder:
        check_sum(source / WEIGHTS, stored.files[WEIGHTS].crc32, progress.add)
        files[WEIGHTS] = save_tensors(tensors, folder / WEIGHTS, PT)
        for name in files[WEIGHTS].nonfinite:  # one that is not held in int8
            raise not_finite(name, source / WEIGHTS)
        for path in others:
            name = path.relative_to(source).as_posix()
            if name in stored.files:
                check_sum(path, stored.files[name].crc32)
            files[name] = copy_file(path, folder / name)
        for path in adapters:
            copy_file(path, folder / path.relative_to(source))
        FolderConfig(2, stored.model, files, stored.extra, Quantized("int8", checksums())).write(folder)
    return files


def _counted(tensor: Lazy, progress: Progress) -> Lazy:
    """The tensor, whose bytes are counted when they are read."""

    def read(start: int, stop: int) -> Tensor:
        rows = tensor.read(start, stop)
        progress.add(rows.nbytes)
        return rows

    return replace(tensor, read=read)
