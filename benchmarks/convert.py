"""Measures `omni-train convert`: memory over the size of what it reads, and the rate at which it writes.

A language model of Qwen2-0.5B's shape goes from Hugging Face's shards into a speech model, that one out as a mini-omni's
`.pth`, and that one in again. Weights are random, and are in the system's folder for temporary files (`TMPDIR`): about 6 GB.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import run_apart
from benchmarks.timing import TimingRow
from omni.checkpoint.tensors import write_safetensors
from omni.convert.contract import text_shapes
from omni.convert.huggingface import text_config, their_name
from omni.convert.lazy import Lazy
from omni.text import Tokenizer

QWEN2_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "max_window_layers": 24,
    "torch_dtype": "bfloat16",
}
"""The keys of the `config.json` of Qwen/Qwen2-0.5B that a conversion reads."""

SHARDS = 4
GROWN = ("--layout", "mini-omni", "--combine", "mean", "--projector", "linear", "--encoder_mode", "padded")
"""Options of a speech model that can be converted to a mini-omni's format."""


def convert(settings: Mapping[str, Any] = QWEN2_05B, encoder: str = "small", shards: int = SHARDS) -> list[TimingRow]:
    """Measures three conversions, one after another, each in a process of its own.

    Memory is counted beyond an interpreter that has imported the command and done nothing. "RSS" includes the resident pages of
    mapped files, which the system takes back when it needs them: weights in `.pth`, and libraries that are touched only during
    work (some 130 MB). "Without files" is what the command holds.

    Args:
        settings: the language model's `config.json`.
        encoder: size of the Whisper that is added to it, with random weights.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder / "hf", settings, shards)
        named = ("--tokenizer", str(folder / "hf" / "tokenizer.json"))  # the tokenizer of bytes, beside a large table
        rows = _row("from Hugging Face", folder / "hf", folder / "model", ("--encoder", encoder, *GROWN, *named))
        rows += _row("to .pth", folder / "model", folder / "pth", ("--kind", "mini-omni"))
        return rows + _row("from .pth", folder / "pth", folder / "again", ("--kind", "mini-omni", *named))


def _row(name: str, source: Path, target: Path, options: Sequence[str]) -> list[TimingRow]:
    taken = run_apart("train.commands.convert", [str(source), str(target), *options, "--quiet"], ["train.convert.convert"])
    read, written = size_of(source), size_of(target)
    return [
        TimingRow(f"{name}: read", read / 1e9, "GB"),
        TimingRow(f"{name}: peak RSS / read", taken.resident / read, "x"),
        TimingRow(f"{name}: peak RSS without files / read", taken.anonymous / read, "x"),
        TimingRow(f"{name}: written", written / 1e6 / taken.seconds, "MB/s"),
    ]


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


def write_model(folder: Path, settings: Mapping[str, Any], shards: int = SHARDS) -> None:
    """Writes a language model's folder as Hugging Face has it: random bf16 weights in shards with an index; bytes as tokens."""
    folder.mkdir()
    text = text_config(settings)
    shapes = {their_name(name): shape for name, shape in text_shapes(text).items()}
    files = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    places = {name: files[number * shards // len(shapes)] for number, name in enumerate(shapes)}
    for file in files:
        own = {name: _drawn(name, shapes[name]) for name, place in places.items() if place == file}
        write_safetensors(folder / file, own)
    index = {"metadata": {"total_size": 2 * sum(map(prod, shapes.values()))}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(dict(settings)))
    Tokenizer.bytes().save(folder / "tokenizer.json")


def _drawn(name: str, shape: tuple[int, ...]) -> Lazy:
    return Lazy.drawn(
        shape, torch.bfloat16, lambda g, rows: torch.randn(rows, *shape[1:], generator=g).mul_(0.02), name, seed=0
    )
