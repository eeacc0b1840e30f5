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
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from omni.config import ModelConfig
from omni.encoder import whisper as speech_encoder
from omni.model import blocks
from omni.model.blocks import Attention, RMSNorm
from train.config.run import FitConfig
from train.data.batching.batch import Batch
from train.objective.objective import targets
from train.plan.balanced import TracedBalance, add_feature_hook, micro_batches_of
from train.plan.quantized import FakeLinear
from train.plan.step import Workbench, build_workbench, take_step

PARTS = ("weights", "gradients", "optimizer", "average", "activations", "objective", "working", "balance", "batch")
"""Parts of the memory: `activations` are kept for the backward pass (and in use during the forward pass), under mixed precision
with them the weights' copies in half precision; `objective` are the buffers of heads and losses; `working` is what the
backward pass, clipping and the optimizer's step need temporarily; `balance` are gradients by task, and what its method
keeps."""

Snapshot = dict[str, float]
"""Bytes by part."""

_MADE_IN = {
    "forward": "activations",
    "objective": "objective",
    "average": "working",
    "optimizer": "working",
    "balance": "balance",
}


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

    def enter(self, tensor: Tensor, part: str, move: bool = False) -> None:
        """Counts a tensor's storage under a part; one that is counted already is moved there if `move`."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            if move:
                size, old = self.live[key]
                self.now[old] -= size
                self.now[part] += size
                self.live[key] = size, part
            return
        size = storage.nbytes()
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
    """Estimates the memory of a step after the first (the optimizer's state is there already): each phase's peak.

    Args:
        shape: of the model, which may differ from the configuration's.
        batch: one with values, such as `train.plan.worst_batch.worst_batch` makes.
        micro_batches: of a step in this process; from the second on gradients are there already.
        cuda: with the kernels of a GPU where they keep something else than those of a CPU.
    """
    fake, ledger, counts = FakeTensorMode(), Ledger(), targets(batch)  # counted while tensors have values
    with fake:
        bench = build_workbench(config, shape, fake=True)
        if cuda:
            _as_on_cuda(bench.objective)
        given = [_faked(batch, fake) for _ in range(micro_batches_of(config, micro_batches))]
        wanted = fake.from_tensor(counts)
    for tensor in [*bench.objective.parameters(), *bench.objective.buffers()]:
        ledger.enter(tensor, "weights")
    for tensor in bench.average.values.values() if bench.average is not None else ():
        ledger.enter(tensor, "average")
    for one in given:
        for tensor in [*(getattr(one, name) for name in Batch.TENSORS), *one.supervised]:
            ledger.enter(tensor, "batch")
    _watch(bench, ledger)
    with fake, ledger, _real_packing(fake):
        _make_state(bench, ledger)
        if config.balance is not None:
            _balance(bench, ledger, len(shape.layout))
        ledger.peaks.clear()
        take_step(bench, given, wanted, 2, ledger.begin)
    return ledger.peaks


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


def _faked(batch: Batch, fake: FakeTensorMode) -> Batch:
    tensors: dict[str, Any] = {name: fake.from_tensor(getattr(batch, name)) for name in Batch.TENSORS}
    made = replace(batch, **tensors)
    made.__dict__["supervised"] = [fake.from_tensor(at) for at in batch.supervised]
    return made


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
    model.decoder.register_forward_hook(lambda *_: ledger.begin("objective"))
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
def _real_packing(fake: FakeTensorMode) -> Iterator[None]:
    """A context in which the encoder plans its packing outside the fake mode, since that needs numbers, and in which norms keep
    no constants for the next call, since these would be fake."""
    real, constant = speech_encoder.pack, blocks._constant

    def pack(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            plan = real(*args, **kwargs)
        groups = [replace(g, place=_fake(g.place, fake), mask=_fake(g.mask, fake)) for g in plan.groups]
        tensors = {name: _fake(getattr(plan, name), fake) for name in ("source", "gaps", "kept", "positions", "output")}
        return replace(plan, groups=groups, **tensors)

    speech_encoder.pack = pack  # type: ignore[assignment]
    blocks._constant = constant.__wrapped__  # type: ignore[assignment]
    try:
        yield
    finally:
        speech_encoder.pack, blocks._constant = real, constant


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
    """Imitates what a GPU's kernels keep: norms as one kernel, products of integers, and keys and values of grouped heads
    copied for every head, as `omni.model.blocks` does there."""
    for module in objective.modules():
        if isinstance(module, RMSNorm):
            module.forward = MethodType(lambda self, x: _FusedNorm.apply(x, self.weight), module)  # type: ignore[method-assign]
        elif isinstance(module, Attention) and module.heads > module.kv_heads:
            extra = 2 * (module.heads - module.kv_heads) * module.head_dim
            module.out.register_forward_pre_hook(lambda _, args, extra=extra: (_Kept.apply(args[0], extra),))
        elif isinstance(module, FakeLinear):
            module.on_cuda = True
