"""Measures the cost of balanced tasks: the same steps of a recipe, plain and balanced by several methods, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import torch

from benchmarks.names import BALANCED
from benchmarks.runs import run_with_batches
from benchmarks.timing import TimingRow
from omni.errors import UserError
from omni.profiling import in_turns, ratio
from train.balance.section import BalanceSection, check_balance
from train.config.parse import read_fit_config
from train.trainer.build import build_balance
from train.trainer.feed import StepBatches
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
    config = replace(
        config,
        balance=(judged or list(sections.values()))[0],
        data=mixture,
        objective=replace(config.objective, align_first=0.0),
    )
    with run_with_batches(config, device, steps) as (loop, given):
        built = {field.name: getattr(loop.step, field.name) for field in fields(PlainStep)}
        variants: dict[str, Step] = {"plain": PlainStep(**built)}
        for name, section in sections.items():
            tasks = build_balance(
                section, config, loop.parts, loop.fabric, loop.group, loop.module, loop.trainable, len(given[0].batches)
            )
            variants[name] = BalancedStep(**built, balance=tasks, start=0.0)

        def slice_of(take: Step, steps: Sequence[StepBatches]) -> None:
            for step in steps:
                take(step, 0.0)

        spent = in_turns({name: partial(slice_of, take) for name, take in variants.items()}, [given], device, rounds)
    plain = spent.pop("plain")
    out = [TimingRow("plain step", statistics.median(plain) / steps * 1e3, "ms")]
    return out + [TimingRow(f"{name}: balanced / plain step", ratio(own, plain), "x") for name, own in spent.items()]
