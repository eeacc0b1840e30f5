"""Makes the tables of `omni-train bench`, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.names import BALANCED, OF_RECIPE
from benchmarks.objective import objective
from benchmarks.step import decoder_step
from benchmarks.timing import TimingRow
from omni.kernels import machine


def sections(
    device: torch.device, only: Sequence[str], positions: int, config: str, methods: Sequence[str] = BALANCED
) -> Iterator[tuple[str, list[TimingRow]]]:
    """Yields title and rows of the tables that `only` names, one after another."""
    if "step" in only:
        yield "training step: nano decoder, 8 x 256 positions", decoder_step(device, "nano", 8, 256, False)
        if device.type == "cuda":
            rows = decoder_step(device, "qwen2-0.5b-omni", 8, 2048, True)
            yield "training step: qwen2-0.5b-omni decoder, 8 x 2048 positions, bf16, compiled", rows
    if set(OF_RECIPE) & set(only):
        from benchmarks.balance import balance
        from benchmarks.checkpoint import checkpoint
        from benchmarks.guard import guard
        from benchmarks.precision import precision
        from benchmarks.runs import data

        of_recipe: dict[str, tuple[str, Callable[..., list[TimingRow]]]] = {
            "data": ("data", data),
            "balance": ("balance of three tasks", partial(balance, methods=methods)),
            "guard": ("graph guard", guard),
            "precision": ("precision", precision),
            "checkpoint": (f"checkpoints, a larger decoder, {machine()['processor']}", checkpoint),
        }
        for name, (title, table) in of_recipe.items():
            if name in only:
                yield f"{title}: {config}", table(config, device)
    if "objective" in only:
        for text, audio in ((0.2, 0.6), (1.0, 1.0)):
            title = f"objective: {positions} positions, {text:.0%} of text and {audio:.0%} of audio supervised"
            yield title, objective(device, text, audio, positions)
    if "convert" in only:
        from benchmarks.convert import convert

        yield "convert: Qwen2-0.5B's shape in bf16, random weights", convert()
    if "prepare" in only:
        from benchmarks.prepare import prepare

        yield "data prepare", prepare()
    if "reading" in only:
        from benchmarks.reading import reading

        yield "prepared rows to packed batches, one core", reading()
