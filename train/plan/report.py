"""Prints a plan as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.console.progress import duration, short
from train.console.tables import new_table, show_table
from train.plan.phases import OUTSIDE
from train.plan.trial import KEPT

if TYPE_CHECKING:
    from rich.table import Table

    from train.plan.plan import Plan

GIB = float(1 << 30)

WORDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer's state",
    "average": "running average",
    "activations": "activations",
    "objective": "heads and losses",
    "working": "in work for a while",
    "balance": "gradients by task",
    "communication": "exchange between devices",
    "copies": "copies of weights",
    "snapshot": "a copy of the state",
    "batch": "batches",
}


def show(plan: Plan, name: str) -> None:
    """Prints a plan; `name` is the run's, for the first title."""
    for table in (_parameters(plan, name), _memory(plan), _phases(plan), _pace(plan)):
        show_table(table)
        print()
    _verdict(plan)


def _table(title: str, *columns: str) -> Table:
    return new_table(title, columns, range(1, len(columns)))


def _parameters(plan: Plan, name: str) -> Table:
    table = _table(f"{name}: parameters", "", "all", "trainable")
    for count in plan.counts:
        table.add_row(count.part, f"{count.total:,}", f"{count.trainable:,}")
    table.add_row("total", f"{sum(c.total for c in plan.counts):,}", f"{sum(c.trainable for c in plan.counts):,}")
    return table


def _memory(plan: Plan) -> Table:
    title = f"memory of the worst batch on each of {plan.world} device(s), {plan.strategy}; fullest at: {plan.estimate.phase}"
    table = _table(title, "", "GiB")
    for part, words in WORDS.items():
        if size := plan.estimate.parts.get(part, 0.0):
            table.add_row(words, f"{size / GIB:.3f}")
    table.add_row("estimate", f"{plan.estimate.total / GIB:.3f}")
    if plan.kept:
        table.add_row("with freed blocks kept, about", f"{(plan.estimate.total + plan.kept) / GIB:.3f}")
    for how, one in plan.attempts.items():
        apart = (plan.estimate.step + (plan.kept if how == KEPT else 0.0)) / one.peak - 1
        table.add_row(f"a step, measured ({how})", f"{one.peak / GIB:.3f}", f"the estimate of it is {apart:+.1%} apart")
    return table


def _phases(plan: Plan) -> Table:
    """A step, and what is outside of it; a machine's memory with Python and its libraries in every process."""
    found, local = plan.estimate, plan.local
    table = _table("memory by phase, GiB", "", "each device", "the machine", "of it mapped files")
    on_host = found.host or {name: local * size for name, size in {"a step": found.step, **found.totals}.items()}
    for name, size in {"a step": found.step, **{name: found.totals.get(name) for name in OUTSIDE}}.items():
        if size is not None or name in on_host:
            mapped = found.files.get(name, 0.0)
            whole = on_host.get(name, 0.0) + local * plan.process + plan.workers * (name != "start") + mapped
            table.add_row(name, *(f"{n / GIB:.3f}" if n else "" for n in (size, whole, mapped)))
    return table


def _pace(plan: Plan) -> Table:
    table, run = _table("pace", "", ""), plan.pace
    table.add_row("tokens a step", f"{run.columns:,.0f}")
    table.add_row("targets a step", f"{run.targets:,.0f}")
    table.add_row("examples a step", "unknown" if run.examples is None else f"{run.examples:,.1f}")
    table.add_row("work a step", f"{run.flops / 1e12:.3g} TFLOP")
    if (run.forwards, run.backwards) != (1, 1):
        table.add_row("passes a step", f"{run.forwards:g} forward, {run.backwards:g} backward")
    table.add_row("time a step", "unknown" if run.seconds is None else f"{run.seconds:.3g} s")
    if plan.traffic is not None:
        table.add_row("sent by each device a step", f"{plan.traffic.sent / 1e9:.3g} GB")
    table.add_row("steps to the budget", "unknown" if run.steps is None else f"{run.steps:,.0f}")
    table.add_row("time to the budget", "unknown" if run.hours is None else duration(3600 * run.hours))
    for name, a_step in (("tokens", run.columns), ("targets", run.targets)):
        whole = run.to_budget(a_step)
        table.add_row(f"{name} to the budget", "unknown" if whole is None else short(whole))
    return table


def _verdict(plan: Plan) -> None:
    print(f"tokens, targets and examples: {plan.pace.source}")
    print("a token is one time step of all streams, as in the log's tokens/s; a target is an id that a loss is over")
    print(f"time: {plan.pace.clock}")
    if plan.traffic is not None:
        print(f"sent: {plan.traffic.formula}")
    if plan.untried:
        print(f"not tried: {plan.untried}")
    for line in plan.reading:
        print(f"reading: {line}")
    workers = f", all data workers {plan.workers / GIB:.2f} GiB" if plan.workers else ""
    print(f"each process takes {plan.process / GIB:.2f} GiB for Python and its libraries{workers}")
    if plan.kept:
        print(
            "on a CPU the C library keeps freed blocks; MALLOC_MMAP_THRESHOLD_=131072 in the environment makes it return them",
        )
    for note in plan.notes:
        print(f"note: {note}")
    if plan.limit is None:
        print(f"device: {plan.device}")
        return
    print(f"device: {plan.device}: {'it fits' if plan.fits else 'IT DOES NOT FIT'}")
    if plan.fits:
        return
    enough = [one for one in plan.knobs if one.fits]
    table = _table("what makes it fit" if enough else "what saves memory; none is enough alone", "", "GiB", "saves", "price")
    for one in enough or plan.knobs:
        table.add_row(one.knob.keys, f"{one.total / GIB:.2f}", f"{one.saved / GIB:.2f}", one.knob.price)
    show_table(table)
    if plan.row:
        table = _table("one after another", "", "GiB", "saves")
        for one in plan.row:
            table.add_row(f"and {one.knob.keys}", f"{one.total / GIB:.2f}", f"{one.saved / GIB:.2f}")
        show_table(table)
    elif not enough:
        print("no row of knobs makes it fit: take a smaller model, shorter rows or larger devices")
