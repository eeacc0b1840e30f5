"""What balanced tasks cost: the same steps of a recipe, plain and balanced by several methods, one after another."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from omni.errors import UserError
from omni.profiling import seconds_of
from train.balance.section import BILEVEL, BalanceSection, check_balance
from train.bench.names import BALANCED
from train.bench.runs import at_hand
from train.bench.timing import TimingRow
from train.config.parse import read_fit_config


def balance(
    file: str, device: torch.device, steps: int = 4, rounds: int = 12, methods: Sequence[str] = BALANCED
) -> list[TimingRow]:
    """A recipe's training steps with balanced tasks, over plain ones: three tasks that ask by speech, batches at hand.

    Slices of plain and balanced steps alternate, and in every other round backwards, so that a machine's moods meet all alike.
    Weights change, work does not: all train one model.

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
    judged = [section for section in sections.values() if section.method in BILEVEL]  # for whom held-out rows are drawn
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            config,
            balance=(judged or list(sections.values()))[0],
            data=mixture,
            objective=replace(config.objective, align_first=0.0),
        )
        loop, given = at_hand(config, device, Path(folder), steps)

        def slice_of() -> None:
            for step in given:
                loop.train(step)

        ways = {"plain": None, **{name: loop.balancing(section) for name, section in sections.items()}}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, way in ways.items() if turn % 2 else reversed(ways.items()):
                loop.balance = way
                spent = seconds_of(slice_of, device)
                if turn:
                    seconds[name].append(spent / steps)
        if loop.logs is not None:
            loop.logs.close()
    plain = seconds.pop("plain")
    ratios = {name: statistics.median(a / b for a, b in zip(own, plain, strict=True)) for name, own in seconds.items()}
    out = [TimingRow("plain step", statistics.median(plain) * 1e3, "ms")]
    return out + [TimingRow(f"{name}: balanced / plain step", ratio, "x") for name, ratio in ratios.items()]
