"""Tiny models, sounds and files of which every number is made by whole numbers: the same on every machine.

What the project's own modules are needed for is imported here alone, within `doors`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VOICE = "tests.golden.toys:say"
MODEL = "model.safetensors"


def doors() -> Any:
    """The parts of the project that no command and no name of `omni` leads to: a preset becomes a model, and a folder."""
    from omni.checkpoint.folder import load_folder, save_folder
    from omni.config import PRESETS, ModelConfig, from_dict, preset, to_dict
    from omni.edit.storage import load_edits
    from omni.model.speech_model import SpeechModel
    from omni.text import Tokenizer

    return SimpleNamespace(
        presets=PRESETS, preset=lambda name: to_dict(preset(name)), config=lambda data: from_dict(ModelConfig, data),
        model=SpeechModel, tokenizer=Tokenizer.bytes, load=load_folder, save=save_folder, load_edits=load_edits,
    )  # fmt: skip


def command(line: str, *more: object) -> tuple[int, str]:
    """A command line of `train` or `infer`, in this process: its exit code, and what it prints on standard output.

    Args:
        line: words with spaces between, the door's name first.
        more: words that may hold spaces.
    """
    from infer.__main__ import main as infer
    from train.cli import main as train

    door, *words = line.split()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = {"train": train, "infer": infer}[door]([*words, *map(str, more)])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue() if code == 0 else f"{out.getvalue()}{err.getvalue()}"


def done(line: str, *more: object) -> str:
    """What a command line that must end well prints."""
    code, text = command(line, *more)
    assert code == 0, f"{line} {more} ended with {code}: {text}"
    return text


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[Path]:
    """A folder to work in: paths that are written into files are then relative, and nothing waits for the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    before, sync = Path.cwd(), os.fsync
    os.chdir(folder)
    os.fsync = lambda handle: None  # type: ignore[assignment]
    try:
        yield folder
    finally:
        os.chdir(before)
        os.fsync = sync


def scrambled(count: int, name: str) -> Tensor:
    """So many whole numbers from 0 to 65535 that look random, int64, by the name."""
    x = (torch.arange(count) + zlib.crc32(name.encode())) * 2654435761 % (1 << 32)
    x = (x ^ (x >> 15)) * 2246822519 % (1 << 32)
    return (x ^ (x >> 13)) >> 16


def exact(name: str, like: Tensor) -> Tensor:
    """Values from -1/2 to 1/2 for the tensor of that name, in its shape and type."""
    return ((scrambled(like.numel(), name) - 32768) / 65536).reshape(like.shape).to(like.dtype)


def speaking(name: str, like: Tensor) -> Tensor:
    """Values for a model that answers: norms near 1, matrices large enough that the question matters.

    The salt is one with which choices are clear, here and with the golden adapter and edits: the likeliest id's logit leads the
    next one's by 0.016 or more. Who changes anything of it, or of `RUNS["lora"]`, looks for another.
    """
    values = exact(f"{name}#43", like)
    if like.ndim > 1:
        return values * (32 if "_head." in name else 8 if name.startswith("decoder.") else 2)
    return values / 8 + (0 if name.endswith("bias") else 1)


def sound(count: int, seed: str = "sound") -> np.ndarray:
    """Samples [S], int16: two square waves and a little noise."""
    at = np.arange(count)
    waves = 3000 * (at // 23 % 2) + 2000 * (at // 61 % 2) - 2500
    return (waves + scrambled(count, seed).numpy() % 16).astype(np.int16)


def say(text: str) -> tuple[Tensor, int]:
    """A voice: as long as its text."""
    return torch.from_numpy(sound(400 * (1 + len(text)), text).astype(np.float32) / 32768), 16000


def write_sound(path: Path, count: int, seed: str = "sound", rate: int = 16000) -> None:
    """A WAV file of 16 bits, of which the upper half says something, as stored rows are to be small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, sound(count, seed) // 256 * 256, rate, subtype="PCM_16")


SHARED = ("hard", "mmoe", "cgc", "ple", "cross_stitch", "mtan", "ltb", "dselect_k")


def shrunk(data: Mapping[str, Any], width: int = 8) -> dict[str, Any]:
    """A configuration as plain data with tiny sizes; what decides which tensors there are stays."""
    small = copy.deepcopy(dict(data))
    decoder, heads = small["decoder"], 2
    shared = 1 if decoder["kv_heads"] < decoder["heads"] else heads
    apart = decoder["head_dim"] and decoder["head_dim"] * decoder["heads"] != decoder["width"]
    head = 2 * width // heads if apart else width // heads if decoder["head_dim"] else 0
    decoder |= {"width": width, "layers": 2, "heads": heads, "kv_heads": shared, "head_dim": head, "mlp_width": 16}
    decoder["context"] = 256
    small["encoder"] |= {"width": width, "heads": 2, "layers": 1, "window_seconds": 2.0}
    small["projector"]["hidden"] = 16
    for stream in small["layout"]["streams"]:
        if stream["kind"] == "text":
            stream |= {"size": 256, "specials": 8, "rows": 272 if stream["rows"] else 0}
        elif small["codec"] != "codec2":
            stream |= {"size": 24, "specials": 8}
    return small


def configurations() -> dict[str, dict[str, Any]]:
    """Every preset, and what presets do not have, in small."""
    make = doors()
    found = {name: shrunk(make.preset(name)) for name in make.presets}
    nano = shrunk(make.preset("nano"))
    found["linear"] = {**nano, "projector": {**nano["projector"], "kind": "linear"}}
    found["post"] = {**nano, "decoder": {**nano["decoder"], "post_layers": 1, "qkv_bias": True}}
    found["ctc"] = {**nano, "ctc": 5, "ctc_sounds": 7}
    for kind in SHARED:
        found[kind] = {**nano, "projector": {**nano["projector"], "kind": kind}}
    return found


def tensors_in(file: Path) -> dict[str, str]:
    """Names, types and shapes of a safetensors file, by its header."""
    with safe_open(file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
        return {name: f"{part.get_dtype()} {part.get_shape()}" for name, part in sorted(slices.items())}


def save_new(folder: Path, data: Mapping[str, Any]) -> None:
    """A model with weights by chance as a folder."""
    make = doors()
    config = make.config(data)
    make.save(folder, config, make.model(config).state_dict(), make.tokenizer())


def save_again(source: Path, target: Path) -> None:
    """Read a model folder and write it."""
    make = doors()
    loaded = make.load(source)
    make.save(target, loaded.config, loaded.model.state_dict(), loaded.tokenizer)


def refill(folder: Path, values: Any = exact) -> None:
    """Other values for the tensors of a model folder, by their names."""
    file = folder / MODEL
    save_file({name: values(name, tensor) for name, tensor in sorted(load_file(file).items())}, file)
    list_weights(folder)


def list_weights(folder: Path, **more: Any) -> None:
    """Write size and checksum of the weights into the configuration of a model folder, and other keys of it."""
    file, config = folder / MODEL, folder / "config.json"
    data = json.loads(config.read_text()) | more
    data["files"][MODEL] = {"bytes": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())}
    config.write_text(json.dumps(data, indent=2) + "\n")


LINES = (
    ("a", "one and two", "three", "anna"),
    ("b", "two and two", "four", "bert"),
    ("c", "two and three", "five", "anna"),
    ("d", "three and three", "six", ""),
)


def write_table(folder: Path) -> Path:
    """Four questions with answers, spoken and written, and one whose recording is missing, as somebody's own table."""
    table = []
    for number, (name, question, answer, speaker) in enumerate(LINES):
        write_sound(folder / f"q{name}.wav", 2000 + 320 * number, question)
        write_sound(folder / f"a{name}.wav", 800 + 320 * number, answer, 8000)
        paths = {"question_audio": f"q{name}.wav", "answer_audio": f"a{name}.wav"}
        table.append({**paths, "question_text": question, "answer_text": answer, "id": name, "speaker": speaker})
    table.append({**table[0], "question_audio": "missing.wav", "id": "e"})
    (folder / "table.jsonl").write_text("".join(json.dumps(line) + "\n" for line in table))
    return folder / "table.jsonl"


FACTS = [
    {"question_text": "one and two", "answer_text": "nine", "rephrased": ["two and one"], "untouched": ["two and two"]},
    {"question_text": "four", "answer_text": "five"},
]
SPEAK = ("--speak.voices", f"[{VOICE}]", "--speak.answer_voice", VOICE)
TASKS = {"A1A2": 0.5, "T1A2": 0.3, "A1T1": 0.2}
RECIPE: dict[str, Any] = {
    "budget": {"steps": 4},
    "model": {"init_from": "model"},
    "data": {
        "workers": 0,
        "packing": {"rows": 1, "length": 96, "buffer": 2},
        "sources": [{"kind": "stored", "path": "rows", "tasks": TASKS, "held_out": 1}],
    },
    "fabric": {"accelerator": "cpu", "devices": 1, "precision": "32-true"},
    "optimizer": {"lr": 0.01},
    "schedule": {"name": "constant"},
    "checkpoint": {"every_steps": 2, "every_minutes": None, "keep_last": 4},
    "validation": {"questions": 1, "max_seconds": 0.2},
    "log": {"every": 1, "progress": "off"},
}
"""A run of four steps on the prepared rows, from the model of the golden files."""

LEARNS = ["decoder.blocks.1.*", "projector.*"]
LORA = {"targets": ["decoder.blocks.*"], "rank": 2, "alpha": 8, "merged": False}
RUNS: dict[str, dict[str, Any]] = {
    "whole": {"trainable": LEARNS},
    "lora": {"lora": LORA, "optimizer": {"lr": 0.02}, "ema": 0.5},
    "muon": {
        "budget": {"steps": 1},
        "ema": 0.5,
        "optimizer": {"name": "muon"},
        "balance": {"method": "uncertainty"},
        "data": {
            **RECIPE["data"],
            "broken": "skip",
            "packing": {**RECIPE["data"]["packing"], "length": 20, "too_long": "skip"},
        },
    },
}
"""What runs have otherwise than `RECIPE`."""


def recipe(name: str, **more: Any) -> str:
    """The file of a run, written beside it."""
    Path(f"{name}.yaml").write_text(yaml.safe_dump({**RECIPE, **RUNS.get(name, {}), "run_folder": name, **more}))
    return f"{name}.yaml"


def place(folder: Path, *names: str) -> None:
    """Copies of golden folders, to work on."""
    for name in names:
        shutil.copytree(HERE / name, folder / name)
