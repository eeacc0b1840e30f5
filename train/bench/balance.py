"""Measures the cost of balanced tasks: the same steps of a recipe, plain and balanced by several methods, in turn."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

from omni.errors import UserError
from omni.profiling import seconds_of
from train.balance.section import BalanceSection, check_balance
from train.bench.names import BALANCED
from train.bench.runs import run_with_batches
from train.bench.timing import TimingRow
from train.config.parse import read_fit_config
from train.trainer.build import build_balance
from train.trainer.step import BalancedStep, PlainStep, Step


def balance(
    file: str, device: torch.device, steps: int = 4, rounds: int = 12, methods: Sequence[str] = BALANCED
) -> list[TimingRow]:
    """Times a recipe's training steps with balanced tasks, over plain ones: three spoken tasks, batches made beforehand.

    Slices of plain and balanced steps alternate, and in every other round in reverse order, so that changes of a machine's
    speed affect all alike. All train one model: its weights change, the work does not.

    Raises:
        UserError: an unknown method or level, or one that does not fit the recipe.
    """
    config = read_fit_config([file])[0]
    source = replace(config.data.sources[0], tasks={"A1T1": 1.0, "A1T2": 1.0, "A1A2": 1.0}, stages=())
    mixture = replace(config.data, sources=(source,))
    sections: dict[str, BalanceSection] = {}
    for method, _, level in (name.partition(":") for name in methods):
        section = BalanceSection(method, level or None)
        check_balance(section, mixture, config.fabric.precision, 1)
        sections[f"{method}, level {section.at}"] = section
    if not sections:
        raise UserError("bench: --methods names none; leave it out, or name some")
    if "famo, level loss" in sections:
        sections["famo, look same"] = BalanceSection("famo", settings={"look": "same"})
    judged = [section for section in sections.values() if section.kind.bilevel]  # these need held-out rows
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            config,
            balance=(judged or list(sections.values()))[0],
            data=mixture,
            objective=replace(config.objective, align_first=0.0),
        )
        loop, given = run_with_batches(config, device, Path(folder), steps)
        built = {field.name: getattr(loop.step, field.name) for field in fields(PlainStep)}
        variants: dict[str, Step] = {"plain": PlainStep(**built)}
        for name, section in sections.items():
            tasks = build_balance(
                section, config, loop.parts, loop.fabric, loop.group, loop.module, loop.trainable, len(given[0].batches)
            )
            variants[name] = BalancedStep(**built, balance=tasks, start=0.0)

        def slice_of(take: Step) -> None:
            for step in given:
                take(step, 0.0)

        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(rounds + 1):
            for name, variant in variants.items() if turn % 2 else reversed(variants.items()):
                spent = seconds_of(partial(slice_of, variant), device)
                if turn:
                    seconds[name].append(spent / steps)
        if loop.logs is not None:
            loop.logs.close()
    plain = seconds.pop("plain")
    ratios = {name: statistics.median(a / b for a, b in zip(own, plain, strict=True)) for name, own in seconds.items()}
    out = [TimingRow("plain step", statistics.median(plain) * 1e3, "ms")]
    return out + [TimingRow(f"{name}: balanced / plain step", ratio, "x") for name, ratio in ratios.items()]
