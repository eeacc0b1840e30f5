"""Estimates peak memory by running one training step under FakeTensorMode, with every storage counted in and out.

PyTorch's fake tensors (`FakeTensorMode`) know shapes, types and who shares whose memory, but hold nothing, so a model of any
size is stepped in seconds. Autograd, checkpointing, mixed precision, the chunked objective and the optimizer's copies are
counted as they happen, not by formulas. Buffers inside kernels and the allocator's waste are not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from omni.attention import packs
from omni.codec.registry import CODECS
from omni.config import ModelConfig
from omni.encoder import whisper as speech_encoder
from omni.generate.options import AnswerOptions
from omni.model import blocks, decoder
from omni.model.blocks import Attention, RMSNorm
from omni.model.decoder import Hidden
from omni.model.speech_model import SpeechModel
from omni.tasks import find_task
from train.config.run import FitConfig
from train.data.batching.batch import Batch
from train.objective.objective import targets
from train.plan.balanced import TracedBalance, add_feature_hook, micro_batches_of
from train.plan.quantized import FakeLinear
from train.plan.step import LOSS, Workbench, build_workbench, measure_loss, random_model, take_step
from train.plan.worst_batch import PROMPT, clips_of
from train.trainer.validation import answering_type

PARTS = ("weights", "gradients", "optimizer", "average", "activations", "objective", "working", "balance", "batch")
"""Parts of the memory: `activations` are kept for the backward pass (and in use during the forward pass), under mixed precision
with them the weights' copies in half precision; `objective` are the buffers of heads and losses; `working` is what the
backward pass, clipping and the optimizer's step need temporarily; `balance` are gradients by task, and what its method
keeps."""

Snapshot = dict[str, float]
"""Bytes by part."""

ANSWERS = "validation's answers"
"""The phase of a validation's free-running generation."""

_MADE_IN = {
    "forward": "activations",
    "objective": "objective",
    "average": "working",
    "optimizer": "working",
    "balance": "balance",
    LOSS: "activations",
    ANSWERS: "activations",
}


CHUNK = 512
"""Time steps of a question that are fed at once (`omni.generate.runner`)."""


class Ledger(TorchDispatchMode):
    """Counts every storage that an operation makes until it is freed, and records each phase's peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[int, str]] = {}
        self.now: Counter[str] = Counter()
        self.peaks: dict[str, Snapshot] = {}
        self.phase, self.part, self.total = "build", "weights", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _ctc(func, args) if func in _CTC else func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.enter(leaf, self.part)
        return out

    def enter(self, tensor: Tensor, part: str, move: bool = False, free: bool = False) -> None:
        """Counts a tensor's storage under a part (as nothing if `free`); one that is counted already is moved if `move`."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            if move:
                size, old = self.live[key]
                self.now[old] -= size
                self.now[part] += size
                self.live[key] = size, part
            return
        size = 0 if free else storage.nbytes()
        self.live[key] = size, part
        self.now[part] += size
        self.total += size
        weakref.finalize(storage, self._free, key)
        if self.total > sum(self.peaks.get(self.phase, {}).values()):
            self.peaks[self.phase] = {name: float(self.now[name]) for name in PARTS}

    def _free(self, key: int) -> None:
        size, part = self.live.pop(key)
        self.now[part] -= size
        self.total -= size

    def begin(self, phase: str) -> None:
        self.phase, self.part = phase, _MADE_IN.get(phase, "working")


_CTC = (torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss_backward.Tensor)


def _ctc(func: Any, args: Any) -> Any:
    """Replaces the alignment loss, which reads lengths as numbers: makes only its tensors, which are the losses [N] and their
    lattice [N, T, 2 S + 1] for S ids, or the gradient."""
    if func is _CTC[1]:
        return torch.empty_like(args[1])
    scores, ids = args[0], args[1]  # [T, N, V], [sum S]
    time, clips = scores.shape[:2]
    longest = -(-ids.numel() // clips)
    return scores.new_empty(clips), scores.new_empty(clips, time, 2 * longest + 1)


def trace(config: FitConfig, shape: ModelConfig, batch: Batch, micro_batches: int, cuda: bool = False) -> dict[str, Snapshot]:
    """Estimates the memory of a step after the first (the optimizer's state is there already), and of a validation after it
    where questions are asked: each phase's peak. The weights of the model that answers are not among it.

    Args:
        shape: of the model, which may differ from the configuration's.
        batch: one with values, such as `train.plan.worst_batch.worst_batch` makes.
        micro_batches: of a step in this process; from the second on gradients are there already.
        cuda: with the kernels of a GPU where they keep something else than those of a CPU.
    """
    config = replace(config, objective=replace(config.objective, chunk=config.objective.chunk_on(cuda)))
    fake, ledger, counts = FakeTensorMode(), Ledger(), targets(batch)  # counted while tensors have values
    given = [batch.moved(fake.from_tensor) for _ in range(micro_batches_of(config, micro_batches))]
    with fake:
        bench = build_workbench(config, shape, fake=True)
        if cuda:
            _as_on_cuda(bench.objective)
        wanted = fake.from_tensor(counts)
        answering = _answering(config, shape, cuda)
    for tensor in [*bench.objective.parameters(), *bench.objective.buffers()]:
        ledger.enter(tensor, "weights")
    for tensor in bench.average.values.values() if bench.average is not None else ():
        ledger.enter(tensor, "average")
    for one in given:
        for tensor in [*(getattr(one, name) for name in Batch.TENSORS), *one.supervised]:
            ledger.enter(tensor, "batch")
    for tensor in [*answering.parameters(), *answering.buffers()]:
        ledger.enter(tensor, "weights", free=True)
    _watch(bench, ledger)
    with fake, ledger, _real_packing(fake, cuda):
        _make_state(bench, ledger)
        if config.balance is not None:
            _balance(bench, ledger, len(shape.layout))
        ledger.peaks.clear()
        take_step(bench, given, wanted, 2, ledger.begin)
        if config.validation.questions:
            measure_loss(bench, given[0], wanted, ledger.begin)
        if config.validation.asks:
            ledger.begin(ANSWERS)
            _answer(answering, config)
    return ledger.peaks


def _answering(config: FitConfig, shape: ModelConfig, cuda: bool) -> SpeechModel:
    """The second model of a validation (`train.trainer.validation`), in its precision."""
    model = random_model(shape, answering_type("cuda" if cuda else "cpu", config.fabric.precision)).eval()
    if cuda:
        _as_on_cuda(model)
    return model


@torch.no_grad()
def _answer(model: SpeechModel, config: FitConfig) -> None:
    """Makes what the first time step of a validation's answers needs: the longest questions, side by side."""
    plan, shape = config.validation, model.config
    tasks = [find_task(name) for name in plan.tasks]
    rows = min(plan.rows, plan.questions * len(tasks))
    count = clips_of(config.data.packing.length, shape)[:1] if any(task.question == "audio" for task in tasks) else []
    length = (count[0] if count else 0) + PROMPT
    most, codec = AnswerOptions(max_seconds=plan.max_seconds), cast(Any, CODECS[shape.codec])  # which has a frame rate
    columns = max(most.limits(task, codec, shape.layout.max_delay)[1] for task in tasks)
    cache = model.make_cache(rows, min(length + columns, shape.decoder.context), dtype=model.decoder.norm.weight.dtype)
    features, index = None, torch.full((rows, length), -1)
    if count:
        frames = min(count[0] * shape.projector.stack, shape.encoder.positions)
        width = shape.encoder.feature_frames(frames)
        inputs = torch.zeros(rows, shape.encoder.bands, width)
        spoken = next(task.name for task in tasks if task.question == "audio")
        features = model.encode(inputs, [width] * rows, [frames] * rows, [spoken] * rows)
        index[:, 1 : 1 + count[0]] = 0
    tokens = torch.zeros(rows, len(shape.layout), min(length, CHUNK), dtype=torch.long)
    hidden = model(tokens, features, index[:, :CHUNK])
    last = Hidden(hidden.text[:, -1:], hidden.audio[:, -1:])
    model.decoder.audio_logits(last), model.decoder.text_logits(last)
    del cache


def _make_state(bench: Workbench, ledger: Ledger) -> None:
    """Makes the optimizer create what it keeps from its first step on, and counts that."""
    for p in bench.learning:
        p.grad = torch.empty_like(p)
    bench.optimizer.step()
    bench.optimizer.zero_grad()
    for state in bench.optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                ledger.enter(value, "optimizer", move=True)


def _balance(bench: Workbench, ledger: Ledger, streams: int) -> None:
    """Makes the step a balanced one, with what its method keeps from earlier steps."""
    fake = TracedBalance(bench.config, bench.named, streams, lambda tensor, part: ledger.enter(tensor, part, move=True))
    if fake.section.at == "features":
        add_feature_hook(bench.objective.model.projector)
    fake.prepare()
    bench.balance = lambda batches, wanted, forward, backward: fake.take(batches, forward, backward)


def _watch(bench: Workbench, ledger: Ledger) -> None:
    """Registers hooks by which the ledger learns when a phase starts and which tensors become gradients.

    The backward pass through a stack of equal blocks has phases that end at its first and last block: between them memory rises
    or falls evenly, so that the peak is at one of the two, whatever the number of blocks.
    """
    for p in bench.learning:
        p.register_post_accumulate_grad_hook(
            lambda p: ledger.enter(p.grad, "gradients", move=True) if p.grad is not None else None
        )
    model = bench.objective.model
    model.decoder.register_forward_hook(lambda *_: ledger.begin("objective") if ledger.phase == "forward" else None)
    stacks = (("encoder", model.encoder.blocks), ("decoder", model.decoder.blocks), ("post", model.decoder.post_blocks))
    for name, stack in stacks:
        for number, block in enumerate(stack):
            if number in (0, len(stack) - 1):
                after = f"backward: {name}, {'last' if number == 0 else 'first'} done"
                block.register_forward_pre_hook(lambda _, args, after=after: _when_done(args[0], ledger, after))


def _when_done(entered: Tensor, ledger: Ledger, phase: str) -> None:
    """Starts a phase when the gradient of a block's input is known."""
    if entered.requires_grad and ledger.phase == "forward":
        entered.register_hook(lambda _: ledger.begin(phase))


@contextmanager
def _real_packing(fake: FakeTensorMode, cuda: bool) -> Iterator[None]:
    """A context in which the encoder plans its packing outside the fake mode, since that needs numbers, in which norms keep no
    constants for the next call, since these would be fake, and in which attention takes the form that it has on a GPU."""
    real, constant, takes = speech_encoder.pack, blocks._constant, decoder.takes_packed

    def pack(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            plan = real(*args, **kwargs)
        groups = [replace(g, place=_fake(g.place, fake), mask=_fake(g.mask, fake)) for g in plan.groups]
        clips = None if plan.clips is None else plan.clips._replace(ends=_fake(plan.clips.ends, fake))
        tensors = {name: _fake(getattr(plan, name), fake) for name in ("source", "gaps", "kept", "positions", "output")}
        return replace(plan, groups=groups, clips=clips, **tensors)

    speech_encoder.pack = pack  # type: ignore[assignment]
    blocks._constant = constant.__wrapped__  # type: ignore[assignment]
    if cuda:
        decoder.takes_packed = speech_encoder.takes_packed = lambda device, dtype, head_size: packs(dtype, head_size)
    try:
        yield
    finally:
        speech_encoder.pack, blocks._constant = real, constant
        decoder.takes_packed = speech_encoder.takes_packed = takes


def _fake(tensor: Tensor | None, fake: FakeTensorMode) -> Any:
    return None if tensor is None else fake.from_tensor(tensor)


# --- what a GPU's kernels keep ----------------------------------------------------------------------------------------


class _FusedNorm(torch.autograd.Function):
    """Keeps what torch's fused RMS norm keeps: its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Kept(torch.autograd.Function):
    """Passes a tensor on and keeps another one for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(x.new_empty(*x.shape[:-1], size))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _as_on_cuda(objective: nn.Module) -> None:
    """Imitates what a GPU's kernels keep: norms as one kernel, products of integers, and, where attention takes a mask, keys
    and values of grouped heads copied for every head, as `omni.attention` does there."""
    for module in objective.modules():
        if isinstance(module, RMSNorm):
            module.forward = MethodType(lambda self, x: _FusedNorm.apply(x, self.weight), module)  # type: ignore[method-assign]
        elif isinstance(module, Attention) and module.heads > module.kv_heads:
            extra, size = 2 * (module.heads - module.kv_heads) * module.head_dim, module.head_dim
            module.out.register_forward_pre_hook(
                lambda _, args, extra=extra, size=size: None if packs(args[0].dtype, size) else (_Kept.apply(args[0], extra),)
            )
        elif isinstance(module, FakeLinear):
            module.on_cuda = True
