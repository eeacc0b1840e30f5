"""Measures the objective against a plain implementation."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import TimingRow
from omni.config import preset
from omni.layout import IGNORE
from omni.profiling import GIB, PeakMemory, timed
from train.objective.cross_entropy import Heads, HeadTargets, linear_cross_entropy


def objective(
    device: torch.device, text: float, audio: float, positions: int = 2048, repeat: int = 1, name: str = "qwen2-0.5b-omni"
) -> list[TimingRow]:
    """Measures forward and backward of the heads and losses, ours and plain, at a preset's vocabulary and width.

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
        targets = HeadTargets(offsets, index, where, scale, 1 << 25)
        total, _ = linear_cross_entropy(Heads(x, x, text_leaf, audio_leaf), targets)
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
        rows.append(TimingRow(f"{label}: forward and backward", seconds, "s"))
        rows.append(TimingRow(f"{label}: peak memory beyond weights and gradients", results[label][1] / GIB, "GiB"))
        if label == "plain":
            wanted = joint_leaf.grad
    assert wanted is not None and text_leaf.grad is not None and audio_leaf.grad is not None
    apart = torch.cat([audio_leaf.grad - wanted[:split], text_leaf.grad - wanted[split:]]).norm() / wanted.norm()
    (a, ma, la, ga), (b, mb, lb, gb) = results["plain"], results["ours"]
    rows += [
        TimingRow("time, ours / plain", b / a, "x"),
        TimingRow("memory, ours / plain", mb / max(ma, 1), "x"),
        TimingRow("loss, relative difference", abs(la - lb) / abs(la)),
        TimingRow("gradient of the states, relative difference", float((ga - gb).norm() / ga.norm())),
        TimingRow("gradient of the weights, relative difference", float(apart)),
    ]
    return rows
