"""`python -m train bench`: the objective against the plain one, the training step, and data made while training.

Every ratio compares two ways of doing the same work in one run, on one machine.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omni.config import preset
from omni.layout import IGNORE, Layout
from omni.model.decoder import Decoder
from train.memory import PeakMemory
from train.objective import LinearCrossEntropy

GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """One line of a table: what was measured, the figure, its unit."""

    name: str
    value: float
    unit: str = ""


def timed(work: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Median seconds of `work` after one warm-up."""
    seconds = []
    for turn in range(repeat + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# --- objective ---------------------------------------------------------------------------------------------------------


def objective(
    device: torch.device, text: float, audio: float, positions: int = 2048, repeat: int = 1, name: str = "qwen2-0.5b-omni"
) -> list[Row]:
    """Forward and backward of the heads and losses, ours and plain, at a preset's vocabulary and width.

    Args:
        text, audio: share of the positions that has a target on the text stream and on each audio stream.
    """
    config = preset(name)
    layout, width = config.layout, config.decoder.width
    g = torch.Generator().manual_seed(0)
    sizes = [s.vocabulary for s in layout.streams]
    offsets = tuple(itertools.accumulate(sizes[:-1], initial=0))
    joint = torch.randn(sum(sizes), width, generator=g).mul_(0.02).to(device)  # audio streams first, text last
    split = offsets[-1]
    audio_weight, text_weight = joint[:split].requires_grad_(), joint[split:].requires_grad_()
    states = torch.randn(positions, width, generator=g).to(device)
    goals = torch.full((1, len(layout), positions), IGNORE)
    for k, s in enumerate(layout.streams):
        n = round(positions * (text if k == layout.n_audio else audio))
        at = torch.randperm(positions, generator=g)[:n]
        goals[0, k, at] = torch.randint(s.size, (n,), generator=g)
    index = [(goals[0, k] != IGNORE).nonzero().squeeze(1).to(device) for k in range(len(layout))]
    goals = goals.to(device)
    scale = torch.tensor([1 / max(len(i), 1) for i in index], device=device)
    joint_leaf = joint.detach().requires_grad_()

    def plain() -> tuple[float, Tensor]:
        joint_leaf.grad = None
        x = states.clone().requires_grad_()
        logits = x @ joint_leaf.T
        total = torch.zeros((), device=device)
        for k, part in enumerate(logits.split(sizes, dim=1)):
            total = total + F.cross_entropy(part, goals[0, k], ignore_index=IGNORE, reduction="sum") * scale[k]
        total.backward()
        assert x.grad is not None
        return float(total.detach()), x.grad

    def ours() -> tuple[float, Tensor]:
        audio_leaf.grad = text_leaf.grad = None
        x = states.clone().requires_grad_()
        where = [goals[0, k][at] for k, at in enumerate(index)]
        total, _ = LinearCrossEntropy.apply(x, x, text_leaf, audio_leaf, offsets, index, where, scale, 1 << 25)
        total.backward()
        assert x.grad is not None
        return float(total.detach()), x.grad

    audio_leaf, text_leaf = audio_weight.detach().requires_grad_(), text_weight.detach().requires_grad_()
    weight_bytes = joint.numel() * joint.element_size()
    rows, results = [], {}
    for label, work in (("plain", plain), ("ours", ours)):
        seconds = timed(work, device, repeat)
        joint_leaf.grad = audio_leaf.grad = text_leaf.grad = None
        with PeakMemory(device) as memory:
            loss, grad = work()
        results[label] = (seconds, max(memory.peak - weight_bytes, 0), loss, grad)
        rows.append(Row(f"{label}: forward and backward", seconds, "s"))
        rows.append(Row(f"{label}: peak memory beyond weights and gradients", results[label][1] / GIB, "GiB"))
        if label == "plain":
            wanted = joint_leaf.grad
    assert wanted is not None and text_leaf.grad is not None and audio_leaf.grad is not None
    apart = torch.cat([audio_leaf.grad - wanted[:split], text_leaf.grad - wanted[split:]]).norm() / wanted.norm()
    (a, ma, la, ga), (b, mb, lb, gb) = results["plain"], results["ours"]
    rows += [
        Row("time, ours / plain", b / a, "x"),
        Row("memory, ours / plain", mb / max(ma, 1), "x"),
        Row("loss, relative difference", abs(la - lb) / abs(la)),
        Row("gradient of the states, relative difference", float((ga - gb).norm() / ga.norm())),
        Row("gradient of the weights, relative difference", float(apart)),
    ]
    return rows


# --- training step -----------------------------------------------------------------------------------------------------

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12, "3090": 71e12}
"""Dense bf16 FLOP/s of some devices, from their data sheets, by a part of the device's name."""


def peak_flops(device: torch.device) -> float | None:
    """The device's peak in bf16, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def decoder_step(device: torch.device, name: str, rows: int, length: int, compiled: bool, repeat: int = 5) -> list[Row]:
    """A whole training step of a preset's decoder and losses on random columns (AdamW, all positions supervised)."""
    config = preset(name)
    layout: Layout = config.layout
    precision = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    decoder = Decoder(config.decoder, layout).to(device)
    run = torch.compile(decoder) if compiled else decoder
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.stack([torch.randint(s.size, (rows, length)) for s in layout.streams], dim=1).to(device)
    index = [torch.arange(rows * length, device=device)] * len(layout)
    where = [tokens[:, k].flatten() for k in range(len(layout))]
    scale = torch.full((len(layout),), 1 / (rows * length), device=device)

    def step() -> None:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            hidden = run(tokens)
            x = hidden.text.flatten(0, 1)
            y = x if hidden.audio is hidden.text else hidden.audio.flatten(0, 1)
            total, _ = LinearCrossEntropy.apply(
                x, y, decoder.text_weight, decoder.audio_head.weight, decoder.audio_offsets, index, where, scale, 1 << 25
            )
        total.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(step, device, repeat)
    positions = rows * length
    inner = sum(p.numel() for n, p in decoder.named_parameters() if "embedding" not in n)
    if decoder.text_head is None:
        inner += decoder.text_embedding.weight.numel()
    c = config.decoder
    flops = 6 * inner * positions + 6 * c.layers * c.heads * c.head_size * length * positions
    out = [
        Row("step", seconds * 1e3, "ms"),
        Row("positions", positions / seconds, "/s"),
        Row("stream tokens", positions * len(layout) / seconds, "/s"),
        Row("model FLOP/s", flops / seconds / 1e12, "TFLOP/s"),
    ]
    peak = peak_flops(device)
    return [*out, Row("MFU", flops / seconds / peak * 100, "%")] if peak else out


# --- the command -------------------------------------------------------------------------------------------------------


def sections(device: torch.device, quick: bool) -> Iterator[tuple[str, list[Row]]]:
    """All tables, one after another."""
    positions = 512 if quick else 2048
    for text, audio in ((0.2, 0.6), (1.0, 1.0)):
        title = f"objective: {positions} positions, {text:.0%} of text and {audio:.0%} of audio supervised"
        yield title, objective(device, text, audio, positions)
    yield "training step: nano decoder, 8 x 256 positions", decoder_step(device, "nano", 8, 256, False)
    if device.type == "cuda":
        rows = decoder_step(device, "qwen2-0.5b-omni", 8, 2048, True)
        yield "training step: qwen2-0.5b-omni decoder, 8 x 2048 positions, bf16, compiled", rows
