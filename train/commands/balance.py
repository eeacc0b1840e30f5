"""`omni-train balance CONFIG`: compare methods of balance over seeds, at equal steps.

Every run is the configuration with another method and seed (of the weights and of the data), trained to its end and asked its
held-out questions as every task. Intervals are by a bootstrap over seeds (`train.eval.measures`), differences are paired by
seed. With few seeds, intervals say little about the tails; the picture shows a point for each seed.
"""

from __future__ import annotations

import json
import signal
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from omni.files import write_json
from omni.tasks import find_task
from omni.utils.arguments import Parser
from omni.utils.charts import INK, drawn, print_table
from omni.utils.process import end_by_signal, importing
from train.balance.config import BalanceConfig, check_balance
from train.config.parse import read_fit_config
from train.config.run import FitConfig
from train.console.command import check_least
from train.console.progress import percent

if TYPE_CHECKING:
    import numpy as np

    from train.eval.measures import Figure

JSON, PICTURE, ALL = "balance.json", "balance.png", "all"


Counts = Mapping[str, Mapping[str, "np.ndarray"]]
"""Right answers and questions [S, 2] by method and task, in the order of the S seeds."""
Figures = Mapping[str, Mapping[str, tuple["Figure", "Figure"]]]
"""Exact match by method and task, and that minus the first method's, with intervals."""


def measure(counts: Counts) -> Figures:
    """The figures of a comparison."""
    from train.eval.measures import difference, figure

    first = next(iter(counts.values()))
    return {
        method: {
            task: (figure("exact_match", table), difference("exact_match", first[task], table))
            for task, table in by_task.items()
        }
        for method, by_task in counts.items()
    }


def variant(config: FitConfig, method: str, seed: int, out: Path) -> FitConfig:
    """The configuration of one run of a method, with its level after a colon (`upgrad:parameters`): at its first level, or
    the configuration's own section where that has this method. UserError for an unknown method, or one that does not fit the
    run."""
    own, (name, _, level) = config.balance, method.partition(":")
    if own is not None and own.method == name and (not level or own.at == level):
        section = own
    else:
        base = own or BalanceConfig()
        section = replace(base, method=name, level=level or None, settings={}, separate=BalanceConfig.separate)
        section = replace(section, separate=base.separate) if section.separates else section
    check_balance(section, config.data, config.fabric.precision, config.fabric.processes)
    data = replace(config.data, seed=seed)
    return replace(config, balance=section, seed=seed, data=data, run_folder=str(out / f"{method.replace(':', '-')}-{seed}"))


def compare(
    config: FitConfig,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    run: Callable[[FitConfig], Any],
    say: Callable[[str], None] = print,
) -> Counts:
    """Trains all runs, seed after seed; one that is finished is not trained again. UserError where a run asked no questions,
    SystemExit where a signal stopped one."""
    import numpy as np

    variants = {(m, s): variant(config, m, s, out) for s in seeds for m in methods}  # all are checked before any is trained
    counts: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    for (method, seed), run_config in variants.items():
        outcome = run(run_config)
        if outcome is not None and outcome.signal:
            name = signal.Signals(outcome.signal).name
            end_by_signal(outcome.signal, f"{run_config.run_folder} was stopped by {name}; run the same command to go on")
        counts[method, seed] = answered(Path(run_config.run_folder))
        right, asked = counts[method, seed][ALL]
        say(f"{method}, seed {seed}: {right:.0f} of {asked:.0f} right")
    tasks = list(next(iter(counts.values())))
    return {m: {task: np.stack([counts[m, s][task] for s in seeds]) for task in tasks} for m in methods}


def answered(folder: Path) -> dict[str, np.ndarray]:
    """Right answers and questions [2] by task, and of all, at the end of a run."""
    import numpy as np

    from train.trainer.validation import ANSWERS

    files = sorted((folder / ANSWERS).glob("step-*.jsonl"))
    if not files:
        raise UserError(f"{folder} has no answers; set validation.questions above 0")
    counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    with open(files[-1], encoding="utf-8") as lines:  # not `splitlines`: answers may hold other separators
        for record in map(json.loads, lines):
            for task in (record["task"], ALL) if record["exact"] is not None else ():
                counts[task] += (record["exact"], 1)
    return dict(sorted(counts.items(), key=lambda item: item[0] == ALL))


def write(counts: Counts, figures: Figures, seeds: Sequence[int], out: Path) -> None:
    """Writes all figures as JSON, and the picture: exact match of every method by task, a point for each seed, and all together
    with the interval."""
    first, methods = next(iter(counts)), dict[str, dict[str, Any]]()
    for method, by_task in figures.items():
        methods[method] = {
            task: {"exact_match": asdict(own), f"more_than_{first}": asdict(more), "by_seed": counts[method][task].tolist()}
            for task, (own, more) in by_task.items()
        }
    write_json(out / JSON, {"seeds": list(seeds), "methods": methods})
    with drawn(out / PICTURE, size=(8, 4)) as axes:
        axis, room, tasks = axes[0, 0], 0.8 / len(counts), list(counts[first])
        for i, (method, by_task) in enumerate(figures.items()):
            for j, (task, (own, _)) in enumerate(by_task.items()):
                x, of = j - 0.4 + room * (i + 0.5), counts[method][task]
                axis.bar(x, own.value, 0.9 * room, color=f"C{i}", alpha=0.35, label=method if j == 0 else None)
                axis.vlines(x, own.low, own.high, color=f"C{i}", linewidth=2)
                axis.plot([x] * len(of), of[:, 0] / of[:, 1], "o", color=INK, markersize=3)
        axis.set_xticks(range(len(tasks)), tasks)
        axis.set(ylim=(0, 1.03), ylabel="exact match, held out")
        axis.set_title(f"balance of the tasks: {len(seeds)} seeds, equal steps")


def shown(figures: Figures, seeds: int) -> tuple[str, tuple[str, ...], list[list[str]]]:
    """The figures as a table: title, columns, rows."""
    first, rows = next(iter(figures)), []
    for task, method in product(figures[first], figures):
        own, more = figures[method][task]
        points = [f"{100 * more.value:+.1f} points", f"{100 * more.low:+.1f} to {100 * more.high:+.1f} points"]
        own_points = [percent(own.value), f"{percent(own.low)} to {percent(own.high)}"]
        rows.append([task, method, *own_points, *(["", ""] if method == first else points)])
    columns = ("task", "method", "exact match", "95 % by seeds", f"more than {first}", "95 %, paired")
    return f"exact match, held out, {seeds} seeds", columns, rows


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = Parser(prog="omni-train balance", description=__doc__)
    parser.add_argument("config", type=str, help="YAML file of a run, or a recipe such as nano-balance")
    parser.add_argument("--methods", type=str, default="equal,upgrad:parameters", help="METHOD or METHOD:LEVEL, with commas")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first_seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="of each run; the configuration's own by default")
    parser.add_argument("--out", type=str, default="runs/balance", help="folder of the runs, figures and picture")
    options = Namespace(**parser.read(argv))
    check_least(vars(options), seeds=1)
    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not methods:
        raise UserError(f"--methods is {options.methods!r}; name at least one, such as upgrad:parameters")
    config, _ = read_fit_config([options.config])
    if options.steps is not None:
        config = replace(config, budget=replace(config.budget, steps=options.steps))
    if config.budget.minutes is not None:
        raise UserError("balance compares methods at equal steps, but the configuration has budget.minutes; give budget.steps")
    if not any(find_task(task).text for task in config.validation.tasks):
        raise UserError(
            "balance compares written answers at the end of each run; name tasks that answer in writing as validation.tasks"
        )
    with importing():
        from train.trainer.build import fit

    out, seeds = Path(options.out), range(options.first_seed, options.first_seed + options.seeds)
    counts = compare(config, methods, seeds, out, fit)
    figures = measure(counts)
    write(counts, figures, seeds, out)
    print_table(*shown(figures, len(seeds)))
    print(f"{out / JSON}\n{out / PICTURE}")
    return 0
