"""The tables of `omni-infer bench`: their rows, the project's targets, and how they are shown."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

from omni.generate.speech_lm import SpeechLM
from omni.model.int8_model import is_int8
from omni.model.speech_model import SpeechModel

TARGETS = {
    ("nano", "fp32", "first exact sample"): 0.150,
    ("nano", "fp32", "first sound, heard"): 0.060,
    ("qwen2-0.5b-omni", "int8", "first sound, heard"): 0.42,
    ("qwen2-0.5b-omni", "int8", "hearing"): 0.15,
    ("nano", "fp32", "real-time factor"): 0.2,
    ("qwen2-0.5b-omni", "fp32", "first exact sample"): 2.4,
    ("qwen2-0.5b-omni", "fp32", "steps / readings"): 0.55,
    ("qwen2-0.5b-omni", "fp32", "text assist / one row"): 1.15,
    ("qwen2-0.5b-omni", "fp32", "peak beyond the weights"): 1.2,
    ("qwen2-0.5b-omni", "bf16", "steps / readings"): 0.4,
    ("qwen2-0.5b-omni", "bf16", "text assist / one row"): 1.15,
    ("qwen2-0.5b-omni", "int8", "first exact sample"): 0.55,
    ("qwen2-0.5b-omni", "int8", "real-time factor"): 0.52,
    ("qwen2-0.5b-omni", "int8", "steps / readings"): 0.5,
}
"""Targets of the project on two CPU cores, by precision: upper limits (for steps / readings a lower one)."""


def number_format(model: SpeechModel) -> str:
    """The number formats of a model: of its weights where they are held in fewer bits, and of all else."""
    name = str(model.decoder.norm.weight.dtype).removeprefix("torch.")
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)
    if not is_int8(model):
        return short
    return "int8" if short == "fp32" else f"int8 with {short}"


def target_of(lm: SpeechLM, name: str, row: str) -> float | None:
    """The target of a figure; None where there is none for this model, number format or device."""
    return TARGETS.get((name, number_format(lm.model), row)) if lm.model.device.type == "cpu" else None


@dataclass(frozen=True)
class FigureRow:
    """A row of a table: name of the figure, its value and unit, and its parts."""

    name: str
    value: float
    unit: str = ""
    note: str = ""
    target: float | None = None

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.name == "steps / readings" else self.value <= self.target


@dataclass(frozen=True)
class FigureTable:
    title: str
    rows: list[FigureRow]


def plain(table: FigureTable) -> dict[str, object]:
    return {"title": table.title, "rows": [{**dataclasses.asdict(r), "met": r.met} for r in table.rows]}


def show(table: FigureTable) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(title=table.title, title_justify="left", box=box.SIMPLE, title_style="bold")
    shown.add_column("figure", no_wrap=True)
    shown.add_column("", justify="right", no_wrap=True)
    shown.add_column("unit", no_wrap=True)
    shown.add_column("target", no_wrap=True)
    shown.add_column("")
    for row in table.rows:
        target = ""
        if row.target is not None:
            sign = ">=" if row.name == "steps / readings" else "<="
            target = f"{sign} {row.target:g} {'met' if row.met else 'missed'}"
        shown.add_row(row.name, _figure(row.value), row.unit, target, row.note)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120).print(shown)


def _figure(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 0.1 else f"{value:.4f}"
