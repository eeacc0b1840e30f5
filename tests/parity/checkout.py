"""A checkout of gpt-omni/mini-omni, imported from where it stands; what it imports and is not installed is stood in for."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import whisper
from torch import Tensor

STANDS_IN = {
    "lightning": (
        "fabric", "fabric.loggers", "fabric.strategies", "fabric.utilities", "fabric.utilities.load", "pytorch",
        "pytorch.cli", "pytorch.loggers",
    ),
    "snac": (),
    "soundfile": (),
    "huggingface_hub": (),
    "tqdm": (),
}  # fmt: skip
"""Packages that the checkout imports at its top and no comparison here calls."""

IDS = {"temperature": 0.9, "top_k": 1, "eos_id_a": 4096, "eos_id_t": 151936, "pad_id_t": 151937, "shift": 152000}
"""What `inference.py` calls its generators with."""


@dataclass
class Checkout:
    """The modules of a checkout.

    Attributes:
        notes: what was stood in for, in words.
    """

    path: Path
    model: Any
    config: Any
    tokenizer: Any
    base: Any
    inference: Any
    snac: Any
    notes: list[str] = field(default_factory=list)

    def generator(self, task: str) -> Any:
        """Its function that answers a task greedily."""
        names = {
            "A1A2": "AA", "A1T2": "AT", "A1T1": "ASR", "T1A2": "TA", "T1T2": "TT", "batch of two": "TA_BATCH",
        }  # fmt: skip
        return getattr(self.base, f"generate_{names[task]}")

    def prompt(self, task: str, question: Any, whisper_model: Any, tokenizer: Any) -> tuple[Tensor | None, list[Tensor]]:
        """Whisper features [B, T, C] of a spoken question, and ids [B, C] of each of the eight streams, as its scripts do."""
        script = self.inference
        if task == "T1A2":
            return None, script.get_input_ids_TA(question, tokenizer)
        if task == "T1T2":
            return None, script.get_input_ids_TT(question, tokenizer)
        mel, length = script.load_audio(question)
        if task == "batch of two":
            return script.get_input_ids_whisper_ATBatch(mel, length, whisper_model, "cpu")
        marks = {"A1A2": {}, "A1T2": {"special_token_a": 4097}, "A1T1": {"special_token_a": 4097, "special_token_t": 151940}}
        return script.get_input_ids_whisper(mel, length, whisper_model, "cpu", **marks[task])

    def answer(self, task: str, model: Any, features: Tensor | None, ids: Sequence[Tensor], steps: int) -> list[list[int]]:
        """Tokens of `steps` columns, or fewer where it ends: one list per stream, or that of the text alone."""
        model.set_kv_cache(batch_size=len(ids[0]))
        length = ids[0].shape[1]
        with quiet():
            out = self.generator(task)(model, features, list(ids), None, None, max_returned_tokens=length + steps, **IDS)
        model.clear_kv_cache()
        return out if isinstance(out[0], list) else [out]


def open_checkout(path: Path) -> Checkout:
    """Import a checkout; SystemExit where the path is none.

    Nothing is written into it: stand-ins live in `sys.modules`, and `whisper.load_audio` takes a waveform as it is, so that no
    ffmpeg is needed.
    """
    if not (path / "litgpt" / "model.py").is_file() or not (path / "inference.py").is_file():
        raise SystemExit(f"{path} is no checkout of gpt-omni/mini-omni: it has no litgpt/model.py and inference.py")
    notes = []
    for package, inner in STANDS_IN.items():
        if importlib.util.find_spec(package) is None:
            for name in (package, *(f"{package}.{part}" for part in inner)):
                sys.modules[name] = _StandIn(name)
            notes.append(f"{package} is not installed: a stand-in was imported for it, and never called")
    sys.path.insert(0, str(path))
    sys.dont_write_bytecode = True
    with quiet():
        modules = [
            importlib.import_module(name)
            for name in (
                "litgpt.model",
                "litgpt.config",
                "litgpt.tokenizer",
                "litgpt.generate.base",
                "inference",
                "utils.snac_utils",
            )
        ]
    for module in modules:
        if not str(module.__file__).startswith(str(path)):
            raise SystemExit(f"{module.__name__} was imported from {module.__file__}, not from {path}")
    torch.set_printoptions(profile="default")  # inference.py changes it
    whisper.load_audio = lambda waveform: waveform.numpy()  # type: ignore[assignment]
    notes.append("whisper.load_audio was replaced by a function that takes a waveform (no ffmpeg)")
    notes.append("GPT got the attribute `device`, which Fabric's wrapper gives it in inference.py")
    model, config, tokenizer, base, inference, snac = modules
    return Checkout(path, model, config, tokenizer, base, inference, snac, notes)


class _StandIn(ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep its prints and bars to itself."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
