"""Validates a model during a run on held-out questions; writes figures, answers and a spectrogram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.config import ModelConfig
from omni.generate.batch import checked
from omni.generate.speech_lm import SpeechLM
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from train.config.sections import ValidationConfig
from train.data.rows.row import Row
from train.eval.held_out import SAMPLE_RATE, HeldOutReport, Item, evaluate, items_of, spoken, write_answers
from train.trainer.plots import SPECTROGRAMS, spectrograms
from train.trainer.signals import break_off

ANSWERS = "validation"


@dataclass
class Validator:
    """Evaluates a second model over the given weights, so that generation does not affect the model in training.

    Attributes:
        items: the questions.
        device, dtype: device and precision of the second model; weights that have both already are not copied.
        folder: of the run; answers and a spectrogram go there.
    """

    model: ModelConfig
    tokenizer: Tokenizer
    codec: AudioCodec | None
    items: Sequence[Item]
    config: ValidationConfig
    device: torch.device
    dtype: torch.dtype
    folder: Path

    def __call__(self, weights: dict[str, Tensor], step: int) -> dict[str, float]:
        """Evaluates weights after `step` steps; returns the figures. `BrokenOff` where the run is asked to stop."""
        model = SpeechModel.from_state(self.model, weights).to(self.device, self.dtype).eval()
        lm = SpeechLM(model, self.tokenizer, self.codec, graph=False)  # a graph of each shape would serve once
        with torch.no_grad(), checked(break_off):
            report = evaluate(lm, self.items, rows=self.config.rows, max_seconds=self.config.max_seconds)
        self._show(report, step)
        return report.figures

    def _show(self, report: HeldOutReport, step: int) -> None:
        write_answers(report, self.folder / ANSWERS / f"step-{step:08d}.jsonl")
        found = spoken(report, self.codec) if self.codec is not None else None
        if found is None or self.codec is None:
            return
        judged, sound = found
        question = judged.item.question
        spectrograms(
            self.folder / SPECTROGRAMS,
            (question, SAMPLE_RATE) if isinstance(question, Tensor) else None,
            (sound, self.codec.sample_rate),
            judged.item.question_text,
            judged.answer.text,
        )


def build_validator(
    config: ValidationConfig,
    rows: Sequence[Row],
    model: ModelConfig,
    tokenizer: Tokenizer,
    codec: AudioCodec | None,
    device: torch.device,
    precision: str,
    folder: Path,
    broken: dict[str, str] | None = None,
) -> Validator | None:
    """Builds the validator of a run on held-out rows; None where no questions are wanted. `broken` as in `items_of`.

    Raises:
        UserError: a row is broken, or none can be asked.
    """
    if not config.asks:
        return None
    items = items_of(rows, config.tasks, codec, model.encoder, broken)
    return Validator(model, tokenizer, codec, items, config, device, answering_type(device.type, precision), folder)


def answering_type(device: str, precision: str) -> torch.dtype:
    """The precision in which a run's model answers on a kind of device."""
    return torch.bfloat16 if device != "cpu" and precision.startswith("bf16") else torch.float32
