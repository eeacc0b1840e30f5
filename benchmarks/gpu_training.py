"""Where a training step of mini-omni's shape spends its time on a GPU: kernels, products, heads, attention, batches.

python -m benchmarks.gpu_training [CHECK ...] [--out FILE] [--small]
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.report import Figures, run_checks
from omni.config import ModelConfig, preset
from omni.layout import IGNORE
from omni.model.attention import PackedRows, takes_packed
from omni.model.attention import attention as attend
from omni.tasks import TASKS
from omni.utils.hardware import peak_flops, synchronize
from omni.utils.profiling import timed
from train.commands.dry_run import Workbench
from train.config.parse import read_fit_config
from train.config.run import FitConfig
from train.data.batching.batch import Batch
from train.distributed.fabric import compile_blocks
from train.objective.cross_entropy import Heads, HeadTargets, linear_cross_entropy
from train.objective.objective import targets
from train.plan.memory import worst_batch
from train.trainer.metrics import StepFlops

HALF = torch.bfloat16
KERNELS = {
    "attention": ("flash", "fmha"),
    "products": ("gemm", "nvjet", "cutlass", "splitk", "gemv"),
    "compiled": ("triton",),
    "optimizer": ("multi_tensor", "adam", "lerp"),
    "embedding": ("embedding", "radix", "sort"),
    "index": ("index", "gather", "scatter"),
    "copies": ("memcpy", "memset", "copy", "fill"),
    "norms": ("layer_norm", "rms"),
    "reductions": ("reduce",),
    "element-wise": ("elementwise", "vectorized"),
}
"""Kinds of kernels by parts of their names; the first that fits counts."""
PRODUCTS = {
    "q, out": (896, 896), "k, v": (896, 128), "q+k+v": (896, 1152), "gate, up": (896, 4864), "gate+up": (896, 9728),
    "down": (4864, 896), "encoder q, k, v, out": (768, 768), "encoder q+k+v": (768, 2304), "encoder up": (768, 3072),
    "encoder down": (3072, 768),
}  # fmt: skip
"""Values in and out of each linear layer."""


def recipe(small: bool) -> tuple[FitConfig, ModelConfig, int]:
    """Run, model and row length that are measured."""
    config, *_ = read_fit_config(["mini-omni/stage3", *["--fabric.precision=32-true"] * small])
    name = "nano" if small else "qwen2-0.5b-omni"  # with random weights: the recipe's folder is not needed
    return replace(config, model=replace(config.model, preset=name, init_from=None)), preset(name), 256 if small else 2048


def fullest(rows: int, small: bool) -> Batch:
    """The batch of most work: all streams supervised in all columns."""
    config, shape, length = recipe(small)
    return worst_batch(replace(config.data, packing=replace(config.data.packing, rows=rows, length=length)), shape)


def typical(rows: int, small: bool) -> Batch:
    """Spoken questions of 6 s with answers of 17 s in SNAC, as VoiceAssistant's: 300 frames heard, 52 ids, 204 frames said."""
    _, shape, length = recipe(small)
    frames, text, audio = (40, 10, 30) if small else (300, 52, 204)
    layout, heard = shape.layout, -(-frames // shape.projector.stack)
    tokens = layout.ids("pad")[None, :, None].repeat(rows, 1, length)
    goals, index = torch.full_like(tokens, IGNORE), torch.full((rows, length), -1)
    segments, task = torch.zeros(rows, length, dtype=torch.long), torch.full((rows, length), -1)
    each, generator = heard + 4 + audio, torch.Generator().manual_seed(0)
    count = length // each
    for number in range(rows * count):
        row, start = number // count, number % count * each
        index[row, start + 1 : start + 1 + heard] = torch.arange(number * heard, (number + 1) * heard)
        for k, stream in enumerate(layout.streams):
            said = slice(start + heard + 3, start + heard + 3 + (text if k == layout.n_audio else audio))
            goals[row, k, said] = torch.randint(stream.size, (said.stop - said.start,), generator=generator)
            tokens[row, k, said.start + 1 : said.stop + 1] = goals[row, k, said]
        segments[row, start:] = number % count
        task[row, start : start + each] = list(TASKS).index("A1A2")
    segments[:, count * each :] = count
    clips, mel = rows * count, shape.encoder.feature_frames(frames)
    sounds = torch.randn(clips, shape.encoder.bands, mel)
    silent: list[list[int]] = [[] for _ in range(clips)]
    return Batch(tokens, goals, index, segments, task, sounds, [mel] * clips, [frames] * clips, silent, clips, clips * each, {})


def workbench(device: torch.device, small: bool, checkpointing: bool = False) -> Workbench:
    """Model, objective and optimizer, with compiled blocks on a GPU."""
    config, shape, _ = recipe(small)
    torch._dynamo.reset()
    with device:  # where the random weights are drawn
        bench = Workbench(config, shape, device)
    bench.objective.model.set_checkpointing(checkpointing)
    if device.type == "cuda":
        compile_blocks(bench.objective)
        bench.objective.compiled = True
    return bench


def measure(
    bench: Workbench, batch: Batch, device: torch.device, repeat: int = 5
) -> tuple[dict[str, float], Callable[[], None]]:
    """Times steps of a batch, each alone and in a row without waiting, as a run takes them.

    Returns:
        Milliseconds, FLOPs and share of the device's peak (MFU), memory; and the step.
    """
    counts = targets(batch)
    step = partial(bench.step, [batch.to(device)], counts.to(device), 1)
    step()  # compiles
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    alone = timed(step, device, repeat)
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    synchronize(device)
    in_row = (time.perf_counter() - start) / repeat
    work = StepFlops(bench.objective.model)(batch, counts)
    figures = {"alone ms": alone * 1e3, "in a row ms": in_row * 1e3, "TFLOP": work / 1e12}
    if device.type == "cuda" and (peak := peak_flops(device)):
        figures |= {"MFU %": 100 * work / in_row / peak, "GiB": torch.cuda.max_memory_allocated() / 2**30}
    return figures, step


def kernel_times(step: Callable[[], None], device: torch.device) -> Figures:
    """Profiles a step; times and launches by kind of kernel."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, *[activity.CUDA] * (device.type == "cuda")]) as profile:
        step()
        synchronize(device)
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profile.key_averages():
        on_cpu = event.device_type == torch.autograd.DeviceType.CPU
        if device.type == "cuda" and on_cpu:
            continue
        low = event.key.lower()
        group = next((group for group, words in KERNELS.items() if any(word in low for word in words)), "other")
        groups[group][0] += (event.self_cpu_time_total if on_cpu else event.self_device_time_total) / 1e3
        groups[group][1] += event.count
    for group, (spent, count) in sorted(groups.items(), key=lambda item: -item[1][0]):
        yield f"kernels, {group}", {"ms": spent, "launches": count}


def batches(device: torch.device, small: bool) -> Figures:
    """The fullest and the typical batch of 16 rows, with their kernels."""
    rows = 2 if small else 16
    for name, make in (("fullest", fullest), ("typical", typical)):
        figures, step = measure(workbench(device, small), make(rows, small), device, 1 if small else 5)
        yield f"{rows} rows, {name}", figures
        for kernels, spent in kernel_times(step, device):
            yield f"{name}, {kernels}", spent


def rows(device: torch.device, small: bool) -> Figures:
    """Both batches by rows: 2 with checkpointing, as shipped recipes have, and 32 without."""
    for count, checkpointing in ((2, True), (32, False))[: 1 if small else None]:
        bench = workbench(device, small, checkpointing)
        for name, make in (("fullest", fullest), ("typical", typical)):
            figures, _ = measure(bench, make(count, small), device, 1 if small else 3)
            yield f"{count} rows, {name}{', checkpointing' * checkpointing}", figures


def products(device: torch.device, small: bool) -> Figures:
    """Rates of every linear layer's three products in bf16 (TFLOP/s), and the weights' gradient with reduced sums or full."""
    count = 64 if small else 32768
    for name, (width, out) in PRODUCTS.items():
        x, weight, grad = (_random(device, *shape) for shape in ((count, width), (out, width), (count, out)))
        works = {
            "forward": partial(F.linear, x, weight),
            "to x": partial(torch.mm, grad, weight),
            "to W": partial(torch.mm, grad.T, x),
        }
        yield name, {product: 2 * count * out * width / timed(work, device, 10) / 1e12 for product, work in works.items()}
    x, grad = _random(device, count, 896), _random(device, count, 4864)
    exact = grad.float().T @ x.float()
    for reduced in (True, False):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
        off = float(((grad.T @ x).float() - exact).norm() / exact.norm())
        yield f"to W, {'reduced' if reduced else 'full'} sums", {"ms": 1e3 * timed(lambda: grad.T @ x, device, 10), "off": off}


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).mul_(0.1).to(HALF)


def heads(device: torch.device, small: bool) -> Figures:
    """The text head's loss with gradients, by the size of its chunks."""
    size, width, count = (640, 64, 256) if small else (152_000, 896, 32_768)
    x, weight = (_random(device, rows, width).requires_grad_() for rows in (count, size))
    at, scale = torch.arange(count, device=device), torch.ones(1, device=device)
    for power in (28, 29, 30):
        goals = HeadTargets((0,), [at], [at % size], scale, 1 << power, compiled=device.type == "cuda")

        def work(goals: HeadTargets = goals) -> object:
            return torch.autograd.grad(linear_cross_entropy(Heads(x, x, weight, weight[:0]), goals)[0], (x, weight))

        yield f"{count} targets, chunks of 2^{power}", {"ms": 1e3 * timed(work, device, 4)}


def attention(device: torch.device, small: bool) -> Figures:
    """Rates of attention over packed sequences (TFLOP/s), forward and backward."""
    packs = {
        "decoder": (14, 2, [1504, 544] * 16), "decoder, short": (14, 2, [540] * 60),
        "encoder": (12, 12, [1500, 540] * 16), "encoder, short": (12, 12, [300] * 48),
    }  # fmt: skip
    for name, (count, kv, lengths) in packs.items():
        lengths = lengths[:2] if small else lengths
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        q, k, v = (_random(device, 1, n, sum(lengths), 64).requires_grad_() for n in (count, kv, kv))
        packed = PackedRows(ends, max(lengths), causal=kv < count) if takes_packed(device, HALF, 64) else None
        forward = partial(attend, q, k, v, packed, grouped=kv < count)
        grad = torch.randn_like(forward())

        def both(
            forward: Callable[[], Tensor] = forward, inputs: tuple[Tensor, ...] = (q, k, v), grad: Tensor = grad
        ) -> object:
            return torch.autograd.grad(forward(), inputs, grad)

        forward_seconds = timed(forward, device, 10)
        backward_seconds = timed(both, device, 10) - forward_seconds
        work = 4 * count * 64 * sum(n * n for n in lengths) / (2 if kv < count else 1) / 1e12
        yield name, {"forward": work / forward_seconds, "backward": 2 * work / backward_seconds}


CHECKS = {check.__name__: check for check in (batches, products, heads, attention, rows)}

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS, __doc__.partition("\n")[0]))
