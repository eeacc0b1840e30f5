"""Finds changes of settings (knobs) with which a run fits: the memory with each one is estimated, the least harmful first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from omni.config import ModelConfig
from omni.errors import UserError
from train.config.run import FitConfig
from train.plan.estimate import Estimate, devices_of, estimate

MANY = (2, 4, 8, 16, 32, 64)
"""Numbers of devices that fsdp is tried on."""


@dataclass(frozen=True)
class Knob:
    """A change to a run.

    Attributes:
        keys: its options on the command line.
        price: what it costs.
        config: the run with it.
    """

    keys: str
    price: str
    config: FitConfig


@dataclass(frozen=True)
class KnobEffect:
    """A knob and its effect: bytes on a device, bytes saved, and whether the run then fits."""

    knob: Knob
    total: float
    saved: float
    fits: bool


Turn = Callable[[FitConfig], Knob | None]
"""Makes a knob of a run; None where it changes nothing."""
Size = Callable[[Estimate], float]


def _chunk(config: FitConfig) -> Knob | None:
    small = 1 << 22
    if config.objective.chunk_on(False) <= small:
        return None
    changed = replace(config, objective=replace(config.objective, chunk=small))
    return Knob(f"--objective.chunk {small}", "nothing but more, smaller products", changed)


def _rows(config: FitConfig) -> Knob | None:
    packing = config.data.packing
    if packing.rows == 1:
        return None
    parts = 2 if packing.rows % 2 == 0 else packing.rows
    rows, micro = packing.rows // parts, config.data.micro_batches * parts
    changed = replace(config, data=replace(config.data, packing=replace(packing, rows=rows), micro_batches=micro))
    return Knob(
        f"--data.packing.rows {rows} --data.micro_batches {micro}",
        "the same step in smaller, less efficient pieces",
        changed,
    )


def _asked(config: FitConfig) -> Knob | None:
    plan = config.validation
    if plan.rows == 1 or not plan.questions:
        return None
    rows = max(1, min(plan.rows, plan.questions * len(plan.tasks)) // 4)
    changed = replace(config, validation=replace(plan, rows=rows))
    return Knob(f"--validation.rows {rows}", "answers in smaller, less efficient pieces", changed)


def _mixed(config: FitConfig) -> Knob | None:
    if config.fabric.precision != "32-true":
        return None
    changed = replace(config, fabric=replace(config.fabric, precision="bf16-mixed"))
    return Knob("--fabric.precision bf16-mixed", "rounded products; faster on a GPU", changed)


def _selective(config: FitConfig) -> Knob | None:
    if config.fabric.checkpointing:
        return None
    changed = replace(config, fabric=replace(config.fabric, checkpointing="selective"))
    return Knob("--fabric.checkpointing selective", "norms, activations and the like computed twice", changed)


def _checkpointing(config: FitConfig) -> Knob | None:
    if config.fabric.checkpointing is True:
        return None
    changed = replace(config, fabric=replace(config.fabric, checkpointing=True))
    return Knob("--fabric.checkpointing true", "about a third more work", changed)


def _fsdp(devices: int) -> Turn:
    def turn(config: FitConfig) -> Knob | None:
        world = devices_of(config)
        if devices < world or devices == 1 or (devices == world and config.fabric.strategy == "fsdp"):
            return None
        micro = -(-config.data.micro_batches // devices) * devices
        fabric = replace(config.fabric, strategy="fsdp", devices=devices, num_nodes=1)
        changed = replace(config, fabric=fabric, data=replace(config.data, micro_batches=micro))
        keys = f"--devices {devices} --fabric.strategy fsdp"
        if micro != config.data.micro_batches:
            keys += f" --data.micro_batches {micro}"
        return Knob(keys, f"{devices} devices that exchange weights in every block", changed)

    return turn


def _true(config: FitConfig) -> Knob | None:
    if config.fabric.precision == "bf16-true":
        return None
    changed = replace(config, fabric=replace(config.fabric, precision="bf16-true"))
    cost = "weights and optimizer rounded: small updates are lost" if config.lora is None else "weights below adapters rounded"
    return Knob("--fabric.precision bf16-true", cost, changed)


def try_knobs(config: FitConfig, shape: ModelConfig, limit: float, cuda: bool) -> tuple[list[KnobEffect], list[KnobEffect]]:
    """Estimates each knob alone, and the shortest sequence of knobs, applied one after another, with which the run fits (empty
    where one suffices or none does). Knobs that save nothing are left out.

    Args:
        limit: bytes of a device that the run may fill.
    """
    start = estimate(config, shape, cuda).total
    world = devices_of(config)
    many = [world] if world > 1 else []
    many += [n for n in MANY if n > world] if cuda else []
    first = _first(cuda)
    alone = list(_alone(config, shape, limit, cuda, start, [*first, *map(_fsdp, many), _true]))
    if any(turned.fits for turned in alone):
        return alone, []
    row: list[KnobEffect] = []
    here, held = config, start
    for turn in [*first, *[_rows, _asked] * 6, *map(_fsdp, many), _true]:
        for turned in _alone(here, shape, limit, cuda, held, [turn]):
            row.append(turned)
            here, held = turned.knob.config, turned.total
            if turned.fits:
                return alone, row
    return alone, []


def savings(config: FitConfig, shape: ModelConfig, devices: int, cuda: bool, in_step: bool) -> list[KnobEffect]:
    """Estimates what each knob alone saves, whether or not the run is estimated to fit; the most first.

    Args:
        devices: most that there are.
        in_step: of the memory at the peak of a step, and not of all phases.
    """
    size: Size = (lambda found: found.step) if in_step else _total
    start = size(estimate(config, shape, cuda))
    turns = [*_first(cuda), *([_fsdp(devices)] if devices > 1 else []), _true]
    return sorted(_alone(config, shape, math.inf, cuda, start, turns, size), key=lambda one: -one.saved)


def _first(cuda: bool) -> list[Turn]:
    """Knobs that leave the number of devices and the weights' precision, the least harmful first."""
    return [_chunk, _asked, _rows, *([_mixed] if cuda else []), _selective, _checkpointing]


def _total(found: Estimate) -> float:
    return found.total


def _alone(
    config: FitConfig, shape: ModelConfig, limit: float, cuda: bool, start: float, turns: list[Turn], size: Size = _total
) -> Iterator[KnobEffect]:
    enough = False
    for turn in turns:
        try:
            knob = turn(config)
        except UserError:  # such as micro-batches that a balance cannot split
            continue
        spread = knob is not None and knob.config.fabric.strategy == "fsdp" and config.fabric.strategy != "fsdp"
        if knob is None or (spread and enough):  # fewer devices are enough already
            continue
        try:
            total = size(estimate(knob.config, shape, cuda))
        except UserError:  # a combination that no run can have, such as Muon with fsdp
            continue
        if total < 0.99 * start:
            enough = enough or (spread and total <= limit)
            yield KnobEffect(knob, total, start - total, total <= limit)
