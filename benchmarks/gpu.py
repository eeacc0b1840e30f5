"""Five checks of what differs on a GPU while a model trains (`omni-train bench --gpu`), each in its own process with a time
limit. `omni-infer bench --gpu` checks what differs while it answers.

A check yields pairs of a text and True or False, for a result that is right or wrong, or None, for a mere figure. `real`: use
the sizes of real models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.child import commands, repeat
from omni.config import preset
from omni.encoder.base import build_encoder
from omni.hardware import peak_flops
from omni.profiling import seconds_of, timed
from omni.recompute import Recompute
from train.config.parse import read_fit_config
from train.distributed.deterministic import deterministic
from train.distributed.fabric import compile_blocks
from train.objective.cross_entropy import Heads, HeadTargets, linear_cross_entropy
from train.objective.flops import StepFlops
from train.objective.objective import targets
from train.plan.step import build_workbench, take_step
from train.plan.worst_batch import worst_batch

Lines = Iterator[tuple[str, bool | None]]
HALF = torch.bfloat16


def attention(device: torch.device, real: bool) -> Lines:
    """Times attention, first and later calls by shape, with and without cuDNN, and with a dense mask against none; checks
    gradients where they were NaN."""

    def run(length: int, masked: bool, value: float) -> Tensor:
        mask = torch.ones(2, 1, length, length, dtype=torch.bool, device=device).tril() if masked else None
        q = torch.full((2, 14, length, 64), value, device=device, dtype=HALF).requires_grad_()
        F.scaled_dot_product_attention(q, -q.detach(), q, mask, is_causal=not masked).sum().backward()
        return q.grad if q.grad is not None else q

    for cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for length, masked in ((64, True), (192, True), (704, True), (2048, True), (2048, False))[: 5 if real else 2]:
            work = partial(run, length, masked, 1.0)
            first, later, finite = seconds_of(work, device), timed(work, device, 5), run(length, masked, 4.0).isfinite().all()
            text = f"cuDNN {cudnn}, {'mask' if masked else 'causal'}, {length}: {first * 1e3:.1f} ms, then {later * 1e3:.2f}"
            yield f"{text}; finite gradients: {bool(finite)}", None if cudnn else bool(finite) and first < later + 0.05
    if real:
        from torch.nn.attention.varlen import varlen_attn

        x, ends = (
            torch.randn(4096, 14, 64, device=device, dtype=HALF),
            torch.arange(0, 4097, 512, device=device, dtype=torch.int32),
        )
        yield (
            f"packed, 8 x 512: {timed(partial(varlen_attn, x, x, x, ends, ends, 512, 512), device, 5) * 1e3:.2f} ms forward",
            None,
        )
    yield clips(device, real)


def clips(device: torch.device, real: bool) -> tuple[str, bool]:
    """Times an encoder of clips from 0.1 s to the whole window, and compares its frames and a gradient in bf16 with fp32."""
    encoder = build_encoder(preset("qwen2-0.5b-omni" if real else "nano").encoder.with_layers(2)).to(device)
    lengths = [encoder.config.feature_frames(n) for n in range(5, encoder.config.positions + 1, 99 if real else 40)]
    frames, found, taken = [(n + 1) // 2 for n in lengths], [], []
    mels = torch.randn(len(lengths), encoder.config.bands, max(lengths), device=device)
    weight = next(p for name, p in encoder.named_parameters() if name.endswith("query.weight"))
    for half in (False, True):

        def work(half: bool = half) -> list[Tensor]:
            with torch.autocast(device.type, HALF, enabled=half):
                out = encoder(mels, lengths, frames)
            return [out.detach().float(), *torch.autograd.grad(out.float().square().mean(), weight)]

        taken.append(timed(work, device, 3))
        found.append(work())
    far = max(float((a - b).norm() / b.norm()) for a, b in zip(found[1], found[0], strict=True))
    text = f"encoder, {len(lengths)} clips: {taken[0] * 1e3:.1f} ms in fp32, {taken[1] * 1e3:.1f} in bf16 by the clips' bounds"
    return f"{text}, off by {far:.0e}", far < 0.05


def training(device: torch.device, real: bool) -> Lines:
    """Times steps of mini-omni's last stage on the fullest batches, by what is recomputed; checks the weights, that nothing
    in a step waits for the device, and that deterministic gradients repeat."""
    config, shape = read_fit_config(["mini-omni/stage3"])[0], preset("qwen2-0.5b-omni" if real else "nano")
    bench = build_workbench(config, shape, device)
    if real:
        compile_blocks(bench.objective)
        bench.objective.compiled = True
    sizes: list[tuple[int, Recompute]] = [(2, True), (8, "selective"), (8, False), (16, False)]
    for rows, again in sizes[: None if real else 1]:
        packing = replace(config.data.packing, rows=rows, length=2048 if real else 64)
        batch = worst_batch(replace(config.data, packing=packing), shape).to(device)
        bench.objective.model.set_checkpointing(again)
        step = partial(take_step, bench, [batch], targets(batch).to(device), 1)
        taken = timed(step, device, 3)
        torch.cuda.set_sync_debug_mode("error")
        step()
        torch.cuda.set_sync_debug_mode("default")
        share = StepFlops(bench.objective.model)(batch, targets(batch)) / taken / (peak_flops(device) or float("nan"))
        text = f"{rows} x {packing.length}, checkpointing {again}: {taken * 1e3:.0f} ms, MFU {share:.1%}, weights finite"
        yield f"{text}, {torch.cuda.max_memory_allocated() >> 20} MiB", all(bool(p.isfinite().all()) for p in bench.learning)
        torch.cuda.reset_peak_memory_stats()
    yield "deterministic gradients are the same twice", repeats(device, 256 if real else 64)


def repeats(device: torch.device, length: int) -> bool:
    """Whether two backward passes of a small model under `fabric.deterministic` give the same bits."""
    config = read_fit_config(["mini-omni/stage3"])[0]
    with deterministic(True):
        bench = build_workbench(config, preset("nano"), device)
        batch = worst_batch(replace(config.data, packing=replace(config.data.packing, rows=2, length=length)), preset("nano"))
        both = []
        for _ in range(2):
            with torch.autocast(device.type, HALF):
                total = bench.objective(batch.to(device), targets(batch).to(device)).total
            both.append(torch.autograd.grad(total, bench.learning, allow_unused=True))
    return all(a is b or torch.equal(a, b) for a, b in zip(*both, strict=True))  # type: ignore[arg-type]


def loss(device: torch.device, real: bool) -> Lines:
    """Times the heads' loss by the size of its chunks, and the gradient of features gathered against that of copied ones."""
    size, rows, width = (152000, 8192, 896) if real else (64, 16, 8)
    x, weight = (torch.randn(n, width, device=device, dtype=HALF).mul_(0.1).requires_grad_() for n in (rows, size))
    at, one = torch.arange(rows, device=device), torch.ones(1, device=device)
    found = []
    for power, compiled in ((25, False), (28, False), (28, True), (29, True)):
        goals = HeadTargets((0,), [at], [at % size], one, 1 << power, compiled=compiled)

        def work(goals: HeadTargets = goals) -> list[Tensor]:
            total, _ = linear_cross_entropy(Heads(x, x, weight, weight[:0]), goals)
            return [total.detach(), *torch.autograd.grad(total, (x, weight))]

        taken = timed(work, device, 3)
        found.append(work())
        far = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found[-1], found[0], strict=True))
        yield f"chunks of 2^{power}{', compiled' * compiled}: {taken * 1e3:.1f} ms, off by {far:.0e}", far < 0.02
    few, index = x[: rows // 4], torch.where(at % 4 == 0, at // 4, 0)
    for name, place in (("gathered", lambda: few[index]), ("copied", lambda: x.detach().index_copy(0, at[::4], few))):
        yield f"features {name}: {timed(lambda p=place: p().sum().backward(), device, 3) * 1e3:.2f} ms", None  # type: ignore[misc]


CHECKS: dict[str, tuple[Callable[[torch.device, bool], Lines], float]] = {
    f.__name__: (f, limit) for f, limit in ((attention, 40), (training, 80), (loss, 50), (repeat, 100), (commands, 150))
}
"""The checks by name, each with its limit in seconds: 420 together."""
