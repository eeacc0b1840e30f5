"""A small random model as a folder, and small questions in the forms that evaluation reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
import torch

from omni.checkpoint.folder import save_folder
from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.model.speech_model import SpeechModel
from tests.sounds import encoded
from tests.train.data.toys import ENCODER, TOKENIZER

RATE = 16000
WORDS = ("one", "two", "three", "four five", "six")
QUICK = ("--max_seconds", "0.4", "--max_tokens", "10", "--batch", "3", "--timed", "2", "--progress", "off")


def model_config(layout: Layout | None = None) -> ModelConfig:
    return ModelConfig(
        layout or Layout.preset("codec2", 256),
        ENCODER,
        ProjectorConfig("linear", stack=2),
        DecoderConfig(width=32, layers=2, heads=4, kv_heads=2, mlp_width=48, context=256),
        codec="codec2",
    )


def random_model(seed: int = 0, layout: Layout | None = None) -> SpeechModel:
    """With weights large enough that its choices differ, among printable characters."""
    torch.manual_seed(seed)
    model = SpeechModel(model_config(layout)).eval()
    with torch.no_grad():
        for p in model.decoder.parameters():
            if p.ndim > 1:
                p.normal_(std=0.3)
    return model


def random_lm(seed: int = 0, layout: Layout | None = None) -> SpeechLM:
    return SpeechLM(random_model(seed, layout), TOKENIZER)


def save_model(folder: Path, seed: int = 0) -> Path:
    model = random_model(seed)
    save_folder(folder, model.config, model.state_dict(), TOKENIZER)
    return folder


def noise(index: int, seconds: float = 0.2) -> np.ndarray:
    return (0.1 * np.random.default_rng(index).standard_normal(round(seconds * RATE))).astype(np.float32)


def write_librispeech(folder: Path, lines: int = 5) -> Path:
    """Two chapters; the last line of the first has no recording."""
    for chapter in (1, 2):
        place = folder / "7" / str(chapter)
        place.mkdir(parents=True)
        names = [f"7-{chapter}-{i:04d}" for i in range(lines)]
        for i, name in enumerate(names):
            soundfile.write(place / f"{name}.flac", noise(10 * chapter + i), RATE)
        said = [f"{name} {WORDS[i % len(WORDS)].upper()}" for i, name in enumerate(names)]
        said += ["7-1-0099 NOWHERE"] if chapter == 1 else []
        (place / f"7-{chapter}.trans.txt").write_text("\n".join(said) + "\n")
    return folder


def wav(index: int) -> bytes:
    return encoded(noise(index))


def voicebench(count: int = 5) -> list[dict[str, Any]]:
    """Records as its sets have them; the second has a recording that is none."""
    rows: list[dict[str, Any]] = [
        {
            "audio": {"bytes": wav(i), "path": f"{i}.wav"},
            "prompt": f"Say {WORDS[i % len(WORDS)]}?",
            "reference": WORDS[i % len(WORDS)],
            "key": i,
            "instruction_id_list": ["a:b", "c"],
            "kwargs": [{"n": i}],
        }
        for i in range(count)
    ]
    rows[1]["audio"] = {"bytes": b"no sound", "path": None}
    return rows


def write_voicebench(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Parquet, or JSON lines with the recordings beside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    for i, row in enumerate(rows):
        (path.parent / f"{i}.wav").write_bytes(row["audio"]["bytes"])
    lines = [json.dumps({**row, "audio": f"{i}.wav"}) for i, row in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
