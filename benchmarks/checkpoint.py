"""Measures what checkpoints cost the steps of a run: those that are written while it trains on, and those between steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.runs import run_with_batches, two_steps
from benchmarks.timing import TimingRow
from omni.files import sync
from omni.hardware import synchronize
from omni.profiling import GIB, free_memory, seconds_of
from train.checkpoint.state import capture
from train.config.sections import CheckpointConfig, OptimizerConfig
from train.trainer.feed import StepBatches
from train.trainer.loop import Loop

LARGE: Mapping[str, Any] = {"width": 1024, "context": 512, "layers": 14, "heads": 16, "kv_heads": 16, "mlp_width": 4096}
"""A decoder of 240 M parameters: 2.9 GB of weights and moments in fp32."""
PARTS = ("copy", "busy", "save", "save_file")
NEEDED, FEWER = 12 * GIB, 4
"""Memory with which that is measured, and the decoder's layers with less."""


def checkpoint(
    file: str, device: torch.device, decoder: Mapping[str, Any] = LARGE, steps: int = 3, rounds: int = 7
) -> list[TimingRow]:
    """Times a recipe's steps with a larger decoder under AdamW, one packed row each: alone, and with a save before them.

    A round takes the same steps plain, with an asynchronous save among them (until its file is written, which is waited for),
    and with a synchronous one, in turn and in every other round in reverse order, so that changes of the machine's speed affect
    all alike; others' work only adds to a time, so that the fastest of each are compared as well. What steps lose is at most
    the wait for the copy and the writer's processor time. A save deletes the checkpoint before it, as in a run.
    """
    config = _config(file, decoder)
    spent: dict[str, list[float]] = {name: [] for name in ("plain", "asynchronous", "synchronous", *PARTS)}
    with run_with_batches(config, device, steps) as (loop, given):
        saver, works = loop.checkpointer, {}
        take = _taking(loop, given)

        def asynchronous() -> None:
            saver.asynchronous = True
            spent["copy"].append(seconds_of(lambda: saver.save(0.0, beside=True), device))
            take()
            writing = saver.writing
            saver.wait()
            spent["busy"].append(0.0 if writing is None else writing.busy)

        def synchronous() -> None:
            saver.asynchronous = False
            spent["save"].append(seconds_of(lambda: saver.save(0.0, beside=True), device))
            take()

        works = {"plain": take, "asynchronous": asynchronous, "synchronous": synchronous}
        for turn in range(rounds + 1):
            for name in works if turn % 2 else reversed(list(works)):
                seconds = seconds_of(works[name], device)
                spent[name].append(seconds)
            spent["save_file"].append(_save_file(loop))
        held = capture(saver.place, loop.position, {}, *saver.training, loop.group)
        size = sum(tensor.nbytes for tensor in held.tensors.values())
    spent = {name: seconds[1:] for name, seconds in spent.items()}  # the first round takes memory
    plain, copy, busy, save, other = (statistics.median(spent[name]) for name in ("plain", *PARTS))
    lost = [a - b for a, b in zip(spent["asynchronous"], spent["plain"], strict=True)]
    more, low, high = statistics.median(lost), min(lost), max(lost)
    quietest = min(spent["asynchronous"]) - min(spent["plain"])
    return [
        TimingRow("state", size / 1e9, "GB"),
        TimingRow(f"{steps} steps", plain, "s"),
        TimingRow(f"{steps} steps, slowest / fastest", max(spent["plain"]) / min(spent["plain"]), "x"),
        TimingRow("synchronous save", save, "s"),
        TimingRow("safetensors' save_file, synced", other, "s"),
        TimingRow("asynchronous save: steps wait for the copy", copy, "s"),
        TimingRow("asynchronous save: processor time of the writer", busy, "s"),
        TimingRow("steps longer with an asynchronous save", more, "s"),
        TimingRow("steps longer with an asynchronous save, least", low, "s"),
        TimingRow("steps longer with an asynchronous save, most", high, "s"),
        TimingRow("steps longer with an asynchronous save, fastest of each", quietest, "s"),
        TimingRow("copy and writer / save_file", (copy + busy) / other * 100, "%"),
        TimingRow("copy and writer / synchronous save", (copy + busy) / save * 100, "%"),
        TimingRow("asynchronous / synchronous save", more / save * 100, "%"),
        TimingRow("asynchronous save / save_file", more / other * 100, "%"),
    ]


def _config(file: str, decoder: Mapping[str, Any]) -> Any:
    config, _ = two_steps(file)
    shape = {**config.model.decoder, **decoder}
    if free_memory() < NEEDED and shape["layers"] > FEWER:
        shape["layers"] = FEWER
    return replace(
        config,
        model=replace(config.model, decoder=shape),
        data=replace(config.data, micro_batches=1, packing=replace(config.data.packing, rows=1)),
        optimizer=OptimizerConfig(),
        ema=None,
        balance=None,
        checkpoint=CheckpointConfig(keep_last=1, keep_best=0),
    )


def _taking(loop: Loop, given: list[StepBatches]) -> Callable[[], None]:
    def take() -> None:
        for batch in given:
            loop.step(batch, 0.5)
            loop.position.step += 1
            synchronize(loop.fabric.device)

    return take


def _save_file(loop: Loop) -> float:
    """Seconds in which safetensors' own function writes the same tensors to the same disk."""
    saver = loop.checkpointer
    tensors = capture(saver.place, loop.position, {}, *saver.training, loop.group).tensors
    folder: Path = loop.folder / "save_file"
    folder.mkdir(exist_ok=True)
    start = time.perf_counter()
    save_file({name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}, folder / "state.safetensors")
    sync(folder)
    seconds = time.perf_counter() - start
    with suppress(OSError):
        (folder / "state.safetensors").unlink()
    return seconds
