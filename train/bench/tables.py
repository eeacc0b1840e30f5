"""What `python -m train bench` measures: the objective against the plain one, the training step, data made while training;
other tables have modules of their own."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omni.config import preset
from omni.hardware import peak_flops
from omni.layout import IGNORE, Layout
from omni.model.decoder import Decoder
from omni.profiling import PeakMemory
from train.commands.bench import BALANCED
from train.objective.cross_entropy import LinearCrossEntropy

if TYPE_CHECKING:
    from train.config.run import FitConfig
    from train.trainer.feed import Step
    from train.trainer.loop import Loop

GIB = 1 << 30
WARM_UP = 6
"""Steps that are not measured at the beginning of a round with data made while it trains."""
EXAMPLES = 4
"""Examples in a row of the training step's table."""


@dataclass(frozen=True)
class Row:
    """One line of a table: what was measured, the figure, its unit."""

    name: str
    value: float
    unit: str = ""


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """How long it takes, with all that it gives the device to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def timed(work: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Median seconds of `work` after one warm-up."""
    return statistics.median([seconds_of(work, device) for _ in range(repeat + 1)][1:])


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


def decoder_step(device: torch.device, name: str, rows: int, length: int, compiled: bool, repeat: int = 5) -> list[Row]:
    """A whole training step of a preset's decoder and losses on random columns (AdamW, all positions supervised).

    Every row is packed with `EXAMPLES` examples of one length that do not see each other, as training's are.
    """
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
    segments = (torch.arange(length, device=device) * EXAMPLES // length).expand(rows, -1)

    def step() -> None:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            hidden = run(tokens, segments=segments)
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
    pairs = positions * (length / EXAMPLES) / 2
    flops = 6 * inner * positions + 12 * (c.layers + c.post_layers) * c.heads * c.head_size * pairs
    out = [
        Row("step", seconds * 1e3, "ms"),
        Row("positions", positions / seconds, "/s"),
        Row("stream tokens", positions * len(layout) / seconds, "/s"),
        Row("model FLOP/s", flops / seconds / 1e12, "TFLOP/s"),
    ]
    peak = peak_flops(device)
    return [*out, Row("MFU", flops / seconds / peak * 100, "%")] if peak else out


# --- data --------------------------------------------------------------------------------------------------------------


def data(file: str, device: torch.device, steps: int = 26, rounds: int = 4) -> list[Row]:
    """A recipe's training steps with data made while it trains, and the same steps with their batches at hand.

    Kinds alternate, so that a machine's moods meet both; while batches are at hand, the loader's workers fill their queue and
    then wait. Where utterances come back (`digits.reuse`), only some steps make new ones: 16 of 124 with the recipe of
    `make demo`; what is measured holds that share.
    """
    from train.config.parse import read_fit_config
    from train.data.batching.loader import StepLoader
    from train.data.build import build_pipeline
    from train.distributed.precision import product_type
    from train.objective.objective import Objective, targets
    from train.optim.optimizer import build_optimizer
    from train.trainer.build import with_alignment
    from train.trainer.initial_model import build_initial

    config = with_alignment(read_fit_config([file])[0])
    half = product_type(config.fabric.precision, config.lora is not None)
    initial = build_initial(config.model, config.seed)
    module = Objective(initial.model, replace(config.objective, align_first=0.0)).to(device)
    optimizer = build_optimizer(
        [(n.removeprefix("model."), p) for n, p in module.named_parameters()], config.optimizer, config.fabric.precision
    )
    pipeline = build_pipeline(config.data, initial.config, initial.tokenizer, initial.codec)

    def run(batches: Iterator[Any], count: int) -> tuple[list[Any], float]:
        seen, start = [], time.perf_counter()
        for _ in range(count):
            step = next(batches)
            wanted = torch.stack([targets(batch) for batch in step]).sum(0).to(device)
            for batch in step:
                with torch.autocast(device.type, half, enabled=half is not None):
                    total = module(batch.to(device), wanted).total
                total.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(step)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return seen, time.perf_counter() - start

    live, at_hand, examples, positions, used = [], [], 0, 0, 0
    loader = StepLoader(
        pipeline, config.data.micro_batches, workers=config.data.workers, prefetch=config.data.prefetch
    )  # fmt: skip
    for _ in range(rounds):
        run(loader, WARM_UP)  # and empties the queue that filled while nothing was drawn
        seen, seconds = run(loader, steps)
        live.append(seconds / steps)
        at_hand.append(run(iter(seen), steps)[1] / steps)
        flat = [batch for step in seen for batch in step]
        examples += sum(b.examples for b in flat)
        positions += sum(b.segments.numel() for b in flat)
        used += sum(b.positions for b in flat)
    loader.close()
    made, given = statistics.fmean(live), statistics.fmean(at_hand)
    return [
        Row("step, batches at hand", given * 1e3, "ms"),
        Row("step, data made while training", made * 1e3, "ms"),
        Row("examples, data made while training", examples / rounds / steps / made, "/s"),
        Row("throughput, made / at hand", given / made, "x"),
        Row("padding", (1 - used / positions) * 100, "%"),
    ]


# --- runs with batches at hand ------------------------------------------------------------------------------------------


def at_hand(config: FitConfig, device: torch.device, folder: Path, count: int) -> tuple[Loop, list[Step]]:
    """A run in one process that writes into `folder`, and the batches of its first steps."""
    from train.distributed.fabric import build_fabric
    from train.trainer.build import prepare
    from train.trainer.signals import Stop

    config = replace(
        config,
        run_folder=str(folder),
        resume="restart",
        fabric=replace(config.fabric, accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, strategy="auto"),
        data=replace(config.data, workers=0),
        validation=replace(config.validation, questions=0),
        log=replace(config.log, progress="off", wandb=None),
    )
    loop = prepare(config, build_fabric(config.fabric), folder)
    with Stop() as stop:
        feed = loop.feed(stop)
        return loop, [feed.next() for _ in range(count)]


# --- the command -------------------------------------------------------------------------------------------------------


def sections(
    device: torch.device, only: Sequence[str], positions: int, config: str, methods: Sequence[str] = BALANCED
) -> Iterator[tuple[str, list[Row]]]:
    """All tables, one after another."""
    if "step" in only:
        yield "training step: nano decoder, 8 x 256 positions", decoder_step(device, "nano", 8, 256, False)
        if device.type == "cuda":
            rows = decoder_step(device, "qwen2-0.5b-omni", 8, 2048, True)
            yield "training step: qwen2-0.5b-omni decoder, 8 x 2048 positions, bf16, compiled", rows
    if "data" in only:
        yield f"data: {config}", data(config, device)
    if "balance" in only:
        from train.bench.balance import balance

        yield f"balance of three tasks: {config}", balance(config, device, methods=methods)
    if "guard" in only:
        from train.bench.guard import guard

        yield f"graph guard: {config}", guard(config, device)
    if "precision" in only:
        from train.bench.precision import precision

        yield f"precision: {config}", precision(config, device)
    if "objective" in only:
        for text, audio in ((0.2, 0.6), (1.0, 1.0)):
            title = f"objective: {positions} positions, {text:.0%} of text and {audio:.0%} of audio supervised"
            yield title, objective(device, text, audio, positions)
    if "convert" in only:
        from train.bench.convert import convert

        yield "convert: Qwen2-0.5B's shape in bf16, random weights", convert()
    if "prepare" in only:
        from train.bench.prepare import prepare

        yield "data prepare", prepare()
    if "reading" in only:
        from train.bench.reading import reading

        yield "prepared rows to packed batches, one core", reading()
