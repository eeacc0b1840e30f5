"""What `omni-train convert` costs: memory over the size of what it reads, and the rate at which it writes.

python -m benchmarks.convert [--out FILE] [--small]

A language model of Qwen2-0.5B's shape goes from Hugging Face's shards into a speech model, that one out as a mini-omni's
`.pth`, and that one in again. Weights are random, and are in the folder for temporary files (`TMPDIR`): about 6 GB.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks.apart import run_apart
from benchmarks.report import Figures, run_checks
from omni.checkpoint.tensors import save_tensors
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

SMALL_LM = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GROWN = ("--layout", "mini-omni", "--combine", "mean", "--projector", "linear", "--encoder_mode", "padded")
"""Options of a speech model that can be converted to a mini-omni's format."""


def convert(device: torch.device, small: bool) -> Figures:
    """Three conversions, one after another, each in a process of its own; memory beyond an interpreter that did nothing.

    RSS counts resident pages of mapped files, which the system takes back when it needs them; "without files" is what is held.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "hf", QWEN2_05B | (SMALL_LM if small else {}), 2 if small else 4)
        named = ("--tokenizer", str(folder / "hf" / "tokenizer.json"))  # the tokenizer of bytes, beside a large table
        for name, source, target, options in (
            ("from Hugging Face", "hf", "model", ("--encoder", "tiny" if small else "small", *GROWN, *named)),
            ("to .pth", "model", "pth", ("--kind", "mini-omni")),
            ("from .pth", "pth", "again", ("--kind", "mini-omni", *named)),
        ):
            words = [str(folder / source), str(folder / target), *options, "--quiet"]
            taken = run_apart("train.cli", ["convert", *words], ["train.convert.convert"])
            read, written = (sum(file.stat().st_size for file in (folder / part).iterdir()) for part in (source, target))
            peaks = {"peak RSS / read": taken.resident / read, "peak RSS without files / read": taken.anonymous / read}
            yield name, {"GB read": read / 1e9, **peaks, "MB/s written": written / 1e6 / taken.seconds}


def write_model(folder: Path, settings: Mapping[str, Any], shards: int) -> None:
    """Writes a language model's folder as Hugging Face has it: random bf16 weights in shards with an index; bytes as tokens."""
    folder.mkdir()
    text = text_config(settings)
    shapes = {their_name(name): shape for name, shape in text_shapes(text).items()}
    files = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    shards_by_name = {name: files[number * shards // len(shapes)] for number, name in enumerate(shapes)}
    for file in files:
        own = {name: _drawn(name, shapes[name]) for name, shard in shards_by_name.items() if shard == file}
        save_tensors(own, folder / file)
    index = {"metadata": {"total_size": 2 * sum(map(prod, shapes.values()))}, "weight_map": shards_by_name}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(dict(settings)))
    Tokenizer.bytes().save(folder / "tokenizer.json")


def _drawn(name: str, shape: tuple[int, ...]) -> Lazy:
    return Lazy.drawn(
        shape, torch.bfloat16, lambda g, rows: torch.randn(rows, *shape[1:], generator=g).mul_(0.02), name, seed=0
    )


CHECKS = {"convert": convert}

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS, __doc__.partition("\n")[0]))
