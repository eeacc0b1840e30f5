"""What parts of training cost, each beside a plain way of the same work in one run.

python -m benchmarks.training [CHECK ...] [--config RECIPE] [--methods METHOD[:LEVEL],...] [--out FILE] [--small]

The objective; data made meanwhile, balance, guard, bf16 and checkpoints of a recipe. A checkpoint takes 9 GB of memory. `real`
needs --parts FOLDER, with SmolLM2-135M-Instruct as smollm/ and Whisper base as whisper/base.pt.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from benchmarks.report import Figures, describe, in_turns, ratio, run_checks
from omni.config import preset
from omni.errors import UserError
from omni.files import sync
from omni.layout import IGNORE
from omni.model.speech_model import SpeechModel
from omni.utils.hardware import synchronize
from omni.utils.profiling import GIB, free_memory, peak_memory, seconds_of, timed
from train.balance.config import BalanceConfig, check_balance
from train.checkpoint.state import capture
from train.cli import main as run_command
from train.config.parse import read_fit_config
from train.config.run import FitConfig
from train.config.sections import BudgetConfig, CheckpointConfig, OptimizerConfig
from train.data.batching.batch import Batch
from train.distributed.fabric import build_fabric
from train.objective.cross_entropy import Heads, HeadTargets, linear_cross_entropy
from train.trainer.balanced_step import Balancing
from train.trainer.build import prepare
from train.trainer.loop import Loop
from train.trainer.parts import StepBatches
from train.trainer.signals import Stop
from train.trainer.step import Feed, GuardedStep, PlainStep, Step

PHASES = {"aligning": 0.0, "all of the model": 0.5}
"""Used shares of the budget: at the first, where the recipe has `objective.align_first`, the decoder does not run."""
SMALL = ("--model.decoder.layers=1", "--model.encoder.layers=1", "--data.packing={rows: 1, length: 256, buffer: 4}")
LARGE: Mapping[str, Any] = {"width": 1024, "context": 512, "layers": 14, "heads": 16, "kv_heads": 16, "mlp_width": 4096}
"""A decoder of 240 M parameters: 2.9 GB of weights and moments in fp32; of four layers where less than `NEEDED` is free."""
NEEDED = 12 * GIB


# --- the objective ----------------------------------------------------------------------------------------------------


def objective(device: torch.device, small: bool) -> Figures:
    """Forward and backward of heads and losses at mini-omni's vocabulary, ours over one matrix of logits."""
    name, positions = ("nano", 64) if small else ("qwen2-0.5b-omni", 2048)
    for text, audio in ((0.2, 0.6), (1.0, 1.0)):
        ours, plain, held = _losses(device, name, positions, text, audio)
        runs = []
        for work in (plain, ours):
            seconds = timed(work, device, 1)
            with peak_memory(device) as memory:
                loss, gradient = work()
            runs.append((seconds, max(memory.peak - held, 1), loss, gradient))
        (a, m, wanted, grad), (b, n, loss, own) = runs
        yield f"{positions} positions, {text:.0%} of text and {audio:.0%} of audio supervised", {
            "plain s": a, "ours s": b, "time, ours / plain": b / a, "plain GiB": m / GIB, "ours GiB": n / GIB,
            "memory, ours / plain": n / m, "loss off": abs(loss - wanted) / abs(wanted),
            "gradient off": float((own - grad).norm() / grad.norm()),
        }  # fmt: skip


def _losses(
    device: torch.device, name: str, positions: int, text: float, audio: float
) -> tuple[Callable[[], tuple[float, Tensor]], Callable[[], tuple[float, Tensor]], int]:
    """Our loss and a plain one with their gradients of the states, and the bytes of the weights' gradients."""
    config, g = preset(name), torch.Generator().manual_seed(0)
    layout, width = config.layout, config.decoder.width
    sizes = [stream.vocabulary for stream in layout.streams]
    offsets = tuple(itertools.accumulate(sizes[:-1], initial=0))
    joint = torch.randn(sum(sizes), width, generator=g).mul_(0.02).to(device).requires_grad_()
    parts = [part.detach().clone().requires_grad_() for part in joint.split([offsets[-1], sizes[-1]])]  # audio, text
    states = torch.randn(positions, width, generator=g).to(device)
    goals = torch.full((len(layout), positions), IGNORE)
    for k, stream in enumerate(layout.streams):
        count = round(positions * (text if k == layout.n_audio else audio))
        goals[k, torch.randperm(positions, generator=g)[:count]] = torch.randint(stream.size, (count,), generator=g)
    index, goals = [(line != IGNORE).nonzero().squeeze(1).to(device) for line in goals], goals.to(device)
    scale = torch.tensor([1 / max(len(at), 1) for at in index], device=device)

    def backward(total: Tensor, x: Tensor) -> tuple[float, Tensor]:
        total.backward()
        assert x.grad is not None
        for leaf in (joint, *parts):
            leaf.grad = None
        return float(total.detach()), x.grad

    def plain() -> tuple[float, Tensor]:
        x = states.clone().requires_grad_()
        each = (
            F.cross_entropy(part, goal, ignore_index=IGNORE, reduction="sum")
            for part, goal in zip((x @ joint.T).split(sizes, dim=1), goals, strict=True)
        )
        return backward((torch.stack(list(each)) * scale).sum(), x)

    def ours() -> tuple[float, Tensor]:
        x = states.clone().requires_grad_()
        where = [goals[k][at] for k, at in enumerate(index)]
        targets = HeadTargets(offsets, index, where, scale, 1 << 25)
        return backward(linear_cross_entropy(Heads(x, x, parts[1], parts[0]), targets)[0], x)

    return ours, plain, joint.nbytes


# --- a recipe's steps -------------------------------------------------------------------------------------------------


def recipe(file: str, small: bool) -> FitConfig:
    """A recipe with a budget of two steps and no guard."""
    return replace(read_fit_config([file, *SMALL * small])[0], budget=BudgetConfig(steps=2), guard=False)


def phases_of(config: FitConfig) -> dict[str, float]:
    """The `PHASES` that a recipe has."""
    return {phase: share for phase, share in PHASES.items() if share or config.objective.align_first}


@contextmanager
def opened(config: FitConfig, device: torch.device, workers: int = 0) -> Iterator[tuple[Loop, Feed]]:
    """Builds a run in one process, in a folder that is removed at the end, and the feed of its steps."""
    with tempfile.TemporaryDirectory() as folder, Stop() as stop:
        config = replace(
            config,
            run_folder=folder,
            resume="restart",
            fabric=replace(config.fabric, accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, strategy="auto"),
            data=replace(config.data, workers=workers),
            validation=replace(config.validation, questions=0),
            log=replace(config.log, progress="off", wandb=None),
        )
        loop = prepare(config, build_fabric(config.fabric), Path(folder))
        feed: Any = loop.feed(stop)
        yield loop, feed
        if hasattr(feed.batches, "close"):
            feed.batches.close()
        for observer in loop.observers:
            observer.close()


@contextmanager
def with_batches(config: FitConfig, device: torch.device, count: int) -> Iterator[tuple[Loop, list[StepBatches]]]:
    """The same with the batches of its first steps made beforehand."""
    with opened(config, device) as (loop, feed):
        yield loop, [feed.next() for _ in range(count)]


def data(device: torch.device, small: bool, config: str) -> Figures:
    """Steps with data made meanwhile, and the same steps with their batches at hand, in turn.

    Steps before each round empty the queue that filled meanwhile. Where utterances are reused, only some make new ones.
    """
    run, steps, rounds = recipe(config, small), 2 if small else 26, 1 if small else 4
    run = replace(run, objective=replace(run.objective, align_first=0.0))
    live, at_hand, examples = [], [], 0
    with opened(run, device, 1 if small else run.data.workers) as (loop, feed):
        for _ in range(rounds):
            for _ in range(2 if small else 6):
                loop.step(feed.next(), 0.5)
            seen: list[StepBatches] = []

            def made(seen: list[StepBatches] = seen) -> None:
                for _ in range(steps):
                    seen.append(feed.next())
                    loop.step(seen[-1], 0.5)

            live.append(seconds_of(made, device) / steps)
            at_hand.append(seconds_of(lambda seen=seen: [loop.step(step, 0.5) for step in seen], device) / steps)  # type: ignore[misc, func-returns-value]
            examples += sum(batch.examples for step in seen for batch in step.batches)
    yield "step", {
        "made meanwhile ms": statistics.fmean(live) * 1e3, "at hand ms": statistics.fmean(at_hand) * 1e3,
        "throughput, made / at hand": sum(at_hand) / sum(live), "examples/s": examples / steps / sum(live),
    }  # fmt: skip


def balance(device: torch.device, small: bool, config: str, methods: str) -> Figures:
    """Steps of three spoken tasks balanced by several methods, over plain ones, in turn. All train one model."""
    run, steps = recipe(config, small), 1 if small else 4
    source = replace(run.data.sources[0], tasks={"A1T1": 1.0, "A1T2": 1.0, "A1A2": 1.0}, stages=())
    mixture = replace(run.data, sources=(source,))
    sections = {name: BalanceConfig(name.partition(":")[0], name.partition(":")[2] or None) for name in methods.split(",")}
    for section in sections.values():
        check_balance(section, mixture, run.fabric.precision, 1)
    judged = [section for section in sections.values() if section.spec.bilevel]  # these need held-out rows
    section, plain = (judged or list(sections.values()))[0], replace(run.objective, align_first=0.0)
    with with_batches(replace(run, balance=section, data=mixture, objective=plain), device, steps) as (loop, batches):
        timed: Any = loop.step
        built = {field.name: getattr(timed.take, field.name) for field in fields(PlainStep)}
        works: dict[str, Step] = {"plain": PlainStep(**built | {"balance": None})}
        parts = loop.validation.parts
        trainable = [(n.removeprefix("model."), p) for n, p in parts.objective.named_parameters() if p.requires_grad]
        for name, section in sections.items():
            own = (parts, built["fabric"], built["module"], trainable, loop.group)
            works[name] = PlainStep(**built | {"balance": Balancing(section, *own, len(batches[0].batches))})
        slices = {name: partial(_slice, step) for name, step in works.items()}
        spent = in_turns(slices, [batches], device, 1 if small else 12)
    yield "plain", {"ms": statistics.median(spent["plain"]) / steps * 1e3}
    for name in sections:
        yield f"{name}, level {sections[name].at}", {"balanced / plain": ratio(spent[name], spent["plain"])}


def _slice(take: Step, steps: list[StepBatches]) -> None:
    for step in steps:
        take(step, 0.0)


def guard(device: torch.device, small: bool, config: str) -> Figures:
    """Steps that the graph guard watches, and steps that it traces, each over the same batch taken plain right beside.

    Raises:
        UserError: it found something in the recipe's own steps, so that they are no measure.
    """
    run, rounds = recipe(config, small), 1 if small else 8
    with with_batches(run, device, 1 if small else 4) as (loop, batches):
        parts = loop.validation.parts
        guarded = GuardedStep(loop.step, parts.objective, loop.optimizer, parts.idle)
        for phase, share in phases_of(run).items():
            plain, watched = partial(loop.step, progress=share), partial(guarded, progress=share)
            spent = in_turns({"plain": plain, "watched": watched}, batches, device, rounds)
            guarded.trace = True
            trace = in_turns({"plain": plain, "traced": watched}, batches, device, 1)
            guarded.trace = False
            yield phase, {
                "plain ms": statistics.median(spent["plain"]) * 1e3, "watched / plain": ratio(spent["watched"], spent["plain"]),
                "traced / plain": ratio(trace["traced"], trace["plain"]),
            }  # fmt: skip
    if guarded.guard.findings:
        raise UserError(f"the guard found something in the steps of {config}:\n{guarded.guard.report()}")


def precision(device: torch.device, small: bool, config: str) -> Figures:
    """Steps in `bf16-mixed` over those in `32-true`: two runs of one configuration take each batch in turn."""
    run = recipe(config, small)
    with ExitStack() as runs:
        loops = {}
        for name in ("32-true", "bf16-mixed"):
            own = replace(run, fabric=replace(run.fabric, precision=name))  # type: ignore[arg-type]
            loops[name], batches = runs.enter_context(with_batches(own, device, 1 if small else 4))
        for phase, share in phases_of(run).items():
            taken = {name: partial(loop.step, progress=share) for name, loop in loops.items()}
            whole, half = in_turns(taken, batches, device, 1 if small else 8).values()
            medians = {"fp32 ms": statistics.median(whole) * 1e3, "bf16 ms": statistics.median(half) * 1e3}
            yield phase, {**medians, "bf16 / fp32": ratio(half, whole)}


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint(device: torch.device, small: bool, config: str) -> Figures:
    """Steps of a larger decoder under AdamW alone, with an asynchronous save among them, and with one between them, in turn.

    safetensors' own function writes the same.
    """
    steps, parts = 1 if small else 3, dict[str, list[float]](copy=[], save=[])
    with with_batches(_large(recipe(config, small), small), device, steps) as (loop, batches):
        saver = loop.checkpointer

        def take(_: object) -> None:
            for batch in batches:
                loop.step(batch, 0.5)
                loop.position.step += 1
            synchronize(device)

        def asynchronous(_: object) -> None:
            saver.asynchronous = True
            parts["copy"].append(seconds_of(lambda: saver.save(beside=True), device))
            take(None)
            saver.wait()

        def synchronous(_: object) -> None:
            saver.asynchronous = False
            parts["save"].append(seconds_of(lambda: saver.save(beside=True), device))
            take(None)

        works = {"plain": take, "asynchronous": asynchronous, "synchronous": synchronous, "file": lambda _: _save_file(loop)}
        spent = in_turns(works, [None], device, 1 if small else 7)
        held = capture(saver.parent, loop.position, {}, saver.training, loop.group)
        size = sum(tensor.nbytes for tensor in held.tensors.values())
    lost = [a - b for a, b in zip(spent["asynchronous"], spent["plain"], strict=True)]
    copy, save = (statistics.median(taken[1:]) for taken in parts.values())
    yield "state", {"GB": size / 1e9, f"{steps} steps s": statistics.median(spent["plain"])}
    yield "save between the steps", {"s": save, "safetensors' save_file, synced s": statistics.median(spent["file"])}
    yield "save beside the steps", {"copy s": copy}
    middle = statistics.median(lost)
    yield "steps longer by", {"s": middle, "least": min(lost), "most": max(lost), "share of a save between": middle / save}


def _large(config: FitConfig, small: bool) -> FitConfig:
    shape = {**config.model.decoder, **({} if small else LARGE)}
    if not small and free_memory() < NEEDED:
        shape["layers"] = 4
    return replace(
        config,
        model=replace(config.model, decoder=shape),
        data=replace(config.data, micro_batches=1, packing=replace(config.data.packing, rows=1)),
        optimizer=OptimizerConfig(),
        ema=None,
        balance=None,
        checkpoint=CheckpointConfig(keep_last=1, keep_best=0),
    )


def _save_file(loop: Loop) -> None:
    """Writes the same tensors to the same disk by safetensors' own function."""
    saver = loop.checkpointer
    tensors = capture(saver.parent, loop.position, {}, saver.training, loop.group).tensors
    folder: Path = saver.folder / "save_file"
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}, folder / "state.safetensors")
    sync(folder)
    with suppress(OSError):
        (folder / "state.safetensors").unlink()


# --- real parts -------------------------------------------------------------------------------------------------------


SENTENCES, WORDS = (
    48,
    ["the", "old", "man", "saw", "small", "ships", "near", "green", "harbours", "and", "asked", "for", "bread"],
)
REAL = """
run_folder: none
budget: {{steps: 2}}
model: {{init_from: {0}/base}}
lora: {{targets: [decoder.blocks.*.attention.q, decoder.blocks.*.attention.v], rank: 16, alpha: 32, trainable: [projector.*]}}
data: {{packing: {{rows: 1, length: 1280, buffer: 32}}, sources: [{{path: {0}/rows, tasks: {{A1T1: 1.0}}}}]}}
fabric: {{precision: bf16-true}}
"""


def real(device: torch.device, small: bool, parts: str) -> Figures:
    """Steps that train LoRA in SmolLM2, frozen in bf16, and a projector of Whisper's kept frames, beside a plain loop's."""
    if not parts:
        raise UserError("real parts are needed: give --parts FOLDER, or name the other checks")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whisper = f"--encoder {parts}/whisper/base.pt --encoder_window 6 --codec codec2"
        projector = "--projector mlp --projector_hidden 2048 --projector_stack 5"
        run_command(["convert", f"{parts}/smollm", f"{name}/base", *whisper.split(), *projector.split()])
        lines = (" ".join(Random(n).choices(WORDS, k=8 + n % 5)) for n in range(16 if small else SENTENCES))
        rows = [json.dumps({"question_text": line, "answer_text": line}) for line in lines]
        (folder / "texts.jsonl").write_text("\n".join(rows))
        prepared = [f"{name}/texts.jsonl", f"{name}/rows", "--speak", "question", "--frames", f"{name}/base"]
        run_command(["data", "prepare", *prepared, "--progress", "off"])
        (folder / "run.yaml").write_text(REAL.format(name))
        run = read_fit_config([f"{name}/run.yaml"])[0]
        with with_batches(run, device, 1 if small else 4) as (loop, steps):
            objective: Any = loop.validation.parts.objective
            plain = _plain_step(f"{parts}/smollm", objective.model, device)
            works = {"ours": lambda step: loop.step(step, 0.5), "plain": lambda step: plain(step.batches[0])}
            spent = in_turns(works, steps, device, 1 if small else 5)
        examples = statistics.fmean(step.batches[0].examples for step in steps)
        columns = statistics.fmean(step.positions for step in steps)
    for way, seconds in spent.items():
        middle = statistics.median(seconds)
        yield f"{way}, {describe(device)['processor']}", {
            "examples": examples, "s": middle, "sentences/s": examples / middle, "tokens/s": columns / middle,
        }  # fmt: skip
    yield "real", {"speed, ours / plain": ratio(spent["plain"], spent["ours"])}


def _plain_step(folder: str, model: SpeechModel, device: torch.device) -> Callable[[Batch], None]:
    """A step of the same examples with transformers and PEFT: padded behind, for which a causal model needs no mask, with
    logits where there is a target."""
    llama = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    lm: Any = get_peft_model(llama, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])).to(device)
    projector = copy.deepcopy(model.projector.project).float()
    learning = [*(p for p in lm.parameters() if p.requires_grad), *projector.parameters()]
    for p in learning:
        p.data = p.data.float()
    optimizer, table, stack = torch.optim.AdamW(learning, lr=1e-3), lm.get_input_embeddings(), model.projector.stack

    def step(batch: Batch) -> None:
        clips = [clip[:, :count].T for clip, count in zip(batch.inputs, batch.frames, strict=True)]
        stacked = [F.pad(clip, (0, 0, 0, -len(clip) % stack)).reshape(-1, stack * clip.shape[1]) for clip in clips]
        with torch.autocast(device.type, torch.bfloat16):
            features = projector(torch.cat(stacked))
            bounds = batch.packed.ends.tolist()
            tokens, targets, index = (x.flatten() for x in (batch.tokens[:, -1], batch.targets[:, -1], batch.feature_index))
            used = [slice(low, high) for low, high in itertools.pairwise(bounds) if batch.task.flatten()[low] >= 0]
            text = nn.utils.rnn.pad_sequence([table(tokens[at].clamp_max(table.num_embeddings - 1)) for at in used], True)
            heard = nn.utils.rnn.pad_sequence([index[at] for at in used], True, -1)
            goals = nn.utils.rnn.pad_sequence([targets[at] for at in used], True, IGNORE)
            x = torch.where((heard >= 0)[..., None], features.to(torch.bfloat16)[heard.clamp_min(0)], text)
            hidden = lm.base_model.model.model(inputs_embeds=x, use_cache=False).last_hidden_state
            logits = lm.base_model.model.lm_head(hidden[goals != IGNORE])
        F.cross_entropy(logits.float(), goals[goals != IGNORE].clamp_max(logits.shape[-1] - 1)).backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


CHECKS = {check.__name__: check for check in (objective, data, balance, guard, precision, checkpoint, real)}
OPTIONS = {"config": "nano-scratch", "methods": "uncertainty,dwa,stch,famo,mgda:features", "parts": ""}

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS, __doc__.partition("\n")[0], **OPTIONS))
