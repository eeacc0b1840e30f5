"""Memory of a run outside of its steps: at its start, while a validation answers, at a checkpoint and at the end.

On a GPU a device's memory and that of the host are counted apart; on a CPU they are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from omni.audio.io import SAMPLE_RATE
from omni.checkpoint.places import WEIGHTS
from omni.config import ModelConfig
from omni.lora.attach import adapted
from omni.model.quantize import numels
from omni.model.speech_model import SpeechModel
from omni.stores.reading import local_path
from train.config.run import FitConfig
from train.data.batching.batch import Batch
from train.plan.quantized import QUANTISING_BYTES, FakeLinear, dense_bytes, packed_bytes
from train.plan.step import LOSS
from train.plan.trace import ANSWERS, Snapshot
from train.plan.worst_batch import worst_batch
from train.trainer.validation import answering_type

START, CHECKPOINT, EXPORT, RESUME = "start", "checkpoint", "export", "resume"
OUTSIDE = (START, LOSS, ANSWERS, CHECKPOINT, EXPORT, RESUME)
"""Phases that are no part of a step."""

COPY = "snapshot"
"""The part of a checkpoint that a run does without where there is no room for it."""

STEADY = ("weights", "optimizer", "average", "balance")
"""Parts that are held between two steps."""

WORKER = 24.0 * (1 << 20)
"""Bytes of a data worker beside its batches that it does not share with the process it was forked from (measured)."""


class Outside:
    """What a run holds outside of its steps.

    Args:
        model: without values.
        steady: bytes by part that one device holds between two steps.
        world: number of processes.
    """

    def __init__(
        self, config: FitConfig, shape: ModelConfig, model: SpeechModel, steady: Mapping[str, float], world: int, cuda: bool
    ) -> None:
        self.config, self.cuda, self.steady = config, cuda, steady
        self.spread, self.local = config.fabric.strategy == "fsdp" and world > 1, world // config.fabric.num_nodes
        self.lora, self.share = config.lora is not None, world if self.spread else 1
        sizes, quantized = numels(model), config.lora is not None and config.lora.quantize is not None
        self.packed = packed_bytes(model)
        coded = {name for name, part in model.named_modules() if isinstance(part, FakeLinear)}
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.own = 2 if config.fabric.precision == "bf16-true" else 4
        self.plain = sum(size for name, size in sizes.items() if ".lora." not in name)
        self.merged = (4 if quantized else self.own) * sum(sizes[f"{name}.weight"] for name in {*adapted(model), *coded})
        self.averaged = self.own * sum(sizes[n] for n in learning) if config.ema is not None and self.own == 2 else 0
        self.whole, self.largest = float(dense_bytes(model)), 4.0 * max(sizes.values())
        self.coded = float(max((sizes[f"{name}.weight"] for name in coded), default=0))
        weights = sum(p.numel() * 4 for p in learning.values()) / self.share if self.lora else steady["weights"]
        self.stored = weights + steady["optimizer"] + steady["average"]
        self.held, self.beside = held_out_bytes(config, shape), saves_beside(config)
        merged = max((sizes[f"{name}.weight"] for name in {*adapted(model), *coded}), default=0)
        self.exported = self.largest * bool(self.spread or self.averaged) + 3 * 4.0 * merged  # sum, product and scaled product

    def phases(self, traced: Mapping[str, Mapping[str, float]]) -> dict[str, Snapshot]:
        """Bytes of a device by phase and part, with the traced ones among them.

        A checkpoint that is written beside the steps is a copy of the state; one of shards is put together into a file's bytes
        besides. A finished run writes, and a resumed one reads, tensor by tensor.
        """
        empty, kind = dict.fromkeys(self.steady, 0.0), self.config.lora.quantize if self.config.lora is not None else None
        dtype = answering_type("cuda" if self.cuda else "cpu", self.config.fabric.precision)
        found = {name: dict(parts) for name, parts in traced.items()}
        if ANSWERS in found:
            found[ANSWERS]["copies"] = self._copied(torch.finfo(dtype).bits // 8)
        found[RESUME] = {**self.steady, "working": self.largest / self.share}
        if self.cuda:
            return found
        found[CHECKPOINT] = {**self.steady, "copies": self.stored * self.spread, COPY: self.stored * self.beside}
        found[EXPORT] = {**self.steady, "copies": self.exported}
        for parts in found.values():
            parts["batch"] += self.held
        quantising = QUANTISING_BYTES[kind] * self.coded if kind is not None else 0.0
        return {START: {**empty, "weights": self.whole, "working": quantising}, **found}

    def _copied(self, size: int) -> float:
        """Bytes that a copy of the weights in values of so many bytes takes beside those in training; none where these serve
        as they are (`train.distributed.fabric.full_state`, `omni.lora.weights.merged_state`)."""
        if self.cuda and (self.spread or self.lora):
            return float(size * self.plain)
        first = self.own * self.plain if self.spread else self.averaged * (not self.lora) + self.merged
        return float(first + size * self.plain * (size != self.own))

    def host(self) -> dict[str, float]:
        """Bytes of a machine's memory by phase, of all its processes, beside what Python and its libraries take; empty on a
        CPU, where the devices' count."""
        if not self.cuda:
            return {}
        gathered = float(self.own * self.plain + self.merged)
        found = {
            START: self.whole + (self.local - 1) * self.packed,  # the first process makes or reads it, and sends it
            ANSWERS: gathered if self.spread or self.lora else 0.0,
            CHECKPOINT: 2 * self.stored * self.local if self.spread else self.stored * self.beside,
            EXPORT: self.exported or self.largest,
            RESUME: self.local * self.largest,
        }
        return {name: size + self.local * self.held for name, size in found.items()}

    def files(self) -> dict[str, float]:
        """Bytes of mapped files by phase, which count as memory of a process until the system takes them back."""
        start = self.config.model.start
        file = local_path(start) / WEIGHTS if start is not None else None
        weights = {START: float(file.stat().st_size)} if file is not None and file.is_file() else {}
        return {**weights, RESUME: self.stored * self.share}


def saves_beside(config: FitConfig) -> bool:
    """True where a run may write a checkpoint while it trains on: before its end, unless `checkpoint.asynchronous` is off."""
    plan, asked, budget = config.checkpoint, config.validation, config.budget
    best = asked.questions > 0 and plan.keep_best > 0
    steps = [plan.every_steps, asked.every_steps if best else None]
    minutes = [plan.every_minutes, asked.every_minutes if best else None]
    last, end = math.inf if budget.steps is None else budget.steps, math.inf if budget.minutes is None else budget.minutes
    soon = any(n is not None and n < last for n in steps) or any(n is not None and n < end for n in minutes)
    return plan.asynchronous and soon and last > 1


def held_out_bytes(config: FitConfig, shape: ModelConfig) -> float:
    """Most bytes that held-out batches and spoken questions take."""
    batch = worst_batch(config.data, shape)
    sound = 4 * SAMPLE_RATE / shape.encoder.frames_per_second * max(batch.frames, default=0)
    return config.validation.questions * (_bytes_of(batch) / batch.examples + sound)


def workers_bytes(config: FitConfig, shape: ModelConfig, world: int) -> float:
    """Bytes of the data workers of a machine, with the batches of the steps that they work ahead."""
    data, step = config.data, config.data.micro_batches // world * _bytes_of(worst_batch(config.data, shape))
    return world // config.fabric.num_nodes * data.workers * (WORKER + data.prefetch * step)


def _bytes_of(batch: Batch) -> float:
    return float(sum(getattr(batch, name).nbytes for name in Batch.TENSORS))
