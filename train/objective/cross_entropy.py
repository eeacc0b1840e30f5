"""Computes cross-entropy, and CTC over a large vocabulary, from hidden states: the head's product and the loss in one, chunk by
chunk.

Dimensions: R rows, T columns, K streams, A audio streams, W width, V vocabulary, N positions with a target, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni.model.attention import multiplied_in
from omni.utils.hardware import to_device


class Heads(NamedTuple):
    """Hidden states and the weights of both heads, whose products are the logits.

    Attributes:
        text, audio: states [R * T, W] that the heads read; one tensor where the model has no post-adapter.
        text_weight, audio_weight: [V, W]; the audio streams' vocabularies one after another.
        text_low, audio_low, text_up, audio_up: [R * T, r] and [V, r], whose product is added to a head's logits (see
            `omni.lora.attach.low_rank`); None without one.
    """

    text: Tensor
    audio: Tensor
    text_weight: Tensor
    audio_weight: Tensor
    text_low: Tensor | None = None
    audio_low: Tensor | None = None
    text_up: Tensor | None = None
    audio_up: Tensor | None = None


@dataclass(frozen=True)
class VocabularyShards:
    """Rows of both heads that this one of several tensor-parallel processes holds.

    Attributes:
        group: of these processes.
        text, audio: first row held, and number of all rows.
    """

    group: Any
    text: tuple[int, int]
    audio: tuple[int, int]


def vocabulary_shards(text: DTensor, audio: DTensor) -> VocabularyShards:
    """This process's rows of two heads that are sharded by rows over one dimension of a mesh."""
    mesh = text.device_mesh
    starts = [mesh.get_local_rank() * -(-head.shape[0] // mesh.size()) for head in (text, audio)]
    return VocabularyShards(mesh.get_group(), (starts[0], text.shape[0]), (starts[1], audio.shape[0]))


@dataclass(frozen=True)
class HeadTargets:
    """Targets of a batch, by stream, and how they are weighted.

    Attributes:
        offsets: first row of each audio stream in the audio head, and the end, [A + 1].
        index: positions with a target, [N] per stream.
        ids: the targets there, [N] per stream.
        scale: factor of each stream's losses, [K].
        chunk: most logits at a time.
        ratio: factor of each target besides, [N] per stream; None for 1.
        compiled: reads the logits twice and writes their gradient once, by torch.compile.
        shards: where the heads' rows are shared by tensor-parallel processes, what this one holds.
    """

    offsets: Sequence[int]
    index: Sequence[Tensor]
    ids: Sequence[Tensor]
    scale: Tensor
    chunk: int
    ratio: Sequence[Tensor] | None = None
    compiled: bool = False
    shards: VocabularyShards | None = None

    def rows(self, stream: int, weight: Tensor) -> tuple[slice, int, int]:
        """Rows of a head's `weight` here that are a stream's, its number of ids, and the id of the first of these rows."""
        text = stream == len(self.offsets) - 1
        first, end = (0, weight.shape[0]) if text else (self.offsets[stream], self.offsets[stream + 1])
        if self.shards is None:
            return slice(first, end), end - first, 0
        start, size = self.shards.text if text else self.shards.audio
        end = size if text else end
        low, high = max(first, start), min(end, start + weight.shape[0])
        return slice(low - start, max(high, low) - start), end - first, low - first


def linear_cross_entropy(heads: Heads, targets: HeadTargets) -> tuple[Tensor, Tensor]:
    """Scaled sum over streams of cross-entropy(hidden @ weight.T, target), without ever holding all logits, and the losses
    of all targets, streams one after another, [sum of N] (without graph).

    The gradient is computed in the forward pass, chunk by chunk with the logits (the loss is a sum, so the gradient is known
    up to the factor that `backward` gets). Only one backward per forward is possible.
    """
    return _LinearCrossEntropy.apply(targets, *heads)  # type: ignore[no-any-return]


def task_cross_entropy(heads: Heads, targets: HeadTargets, task: Sequence[Tensor], tasks: int) -> tuple[Tensor, Tensor]:
    """Losses of the tasks [M], each differentiable, by cross-entropy as in `linear_cross_entropy`, and of all targets.

    Their weights are known in `backward` only, where logits are computed once more. Any combination of the losses may be
    differentiated, any number of times. `targets` have `ratio`, and `task` the index of each target's task, [N] per stream.
    """
    return _TaskCrossEntropy.apply(targets, task, tasks, *heads)  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, targets: HeadTargets, *states: Tensor | None) -> tuple[Tensor, Tensor]:
        heads = Heads(*states)  # type: ignore[arg-type]
        ctx.dtypes = [None if t is None else t.dtype for t in heads]
        total, each, ctx.gradients = _losses_and_gradients(heads, ctx.needs_input_grad[1:], targets, multiplied_in(heads.text))
        ctx.mark_non_differentiable(each)
        return total, each

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy was asked for a second backward through one forward: its gradients are handed on, not "
                "kept; run the objective's forward again"
            )
        gradients = [
            None if g is None else g.mul_(grad.to(g.dtype)).to(dtype)
            for g, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        ctx.gradients = None
        return (None, *gradients)


class _TaskCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, targets: HeadTargets, task: Sequence[Tensor], tasks: int, *states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        heads, ratio = Heads(*states), targets.ratio  # type: ignore[arg-type]
        assert ratio is not None
        ctx.dtype = multiplied_in(heads.text)
        _, each, _ = _losses_and_gradients(heads, (False,) * 8, replace(targets, ratio=None), ctx.dtype)
        factors = torch.cat([targets.scale[k] * part for k, part in enumerate(ratio)])
        losses = sum_by(torch.cat(list(task)), each * factors, tasks)
        ctx.save_for_backward(*heads, targets.scale, *targets.index, *targets.ids, *ratio, *task)
        ctx.same, ctx.offsets, ctx.chunk = heads.audio is heads.text, targets.offsets, targets.chunk
        ctx.compiled = targets.compiled
        ctx.streams = len(targets.index)
        ctx.mark_non_differentiable(each)
        return losses, each

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        heads, scale, rest = Heads(*ctx.saved_tensors[:8]), ctx.saved_tensors[8], ctx.saved_tensors[9:]
        index, ids, ratio, task = (rest[i * ctx.streams : (i + 1) * ctx.streams] for i in range(4))
        size = grad.abs().amax().clamp_min(1e-30)  # a loss scaler's factor would overflow fp16 inside the products
        share = [r * (grad / size)[t] for r, t in zip(ratio, task, strict=True)]
        if ctx.same:
            heads = heads._replace(audio=heads.text)
        targets = HeadTargets(ctx.offsets, index, ids, scale, ctx.chunk, share, ctx.compiled)
        _, _, scaled = _losses_and_gradients(heads, ctx.needs_input_grad[3:], targets, ctx.dtype)
        gradients = [
            None if g is None or t is None else g.mul_(size.to(g.dtype)).to(t.dtype) for g, t in zip(scaled, heads, strict=True)
        ]
        return (None, None, None, *gradients)


class _LogSumExp(torch.autograd.Function):
    """logsumexp(x @ weight.T) [N] of x [N, W] and a weight [V, W] without gradient, at most `chunk` logits at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunk: int) -> Tensor:
        step, means, out = max(1, chunk // len(weight)), [x[:0].float()], [x.new_zeros(0, dtype=torch.float32)]
        for low in range(0, len(x), step):
            logits = (x[low : low + step].to(weight.dtype) @ weight.T).float()
            largest = logits.amax(1, keepdim=True)
            share = logits.sub_(largest).exp_()
            norm = share.sum(1, keepdim=True)
            out.append((norm.log() + largest).squeeze(1))
            if ctx.needs_input_grad[0]:
                means.append(_product(share.to(weight.dtype), weight) / norm)
        ctx.save_for_backward(torch.cat(means))
        return torch.cat(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (means,) = ctx.saved_tensors
        return grad[:, None] * means, None, None


SAMPLED = 4096
"""Ids that a training step reads of a larger vocabulary, of its first ones and of the others each."""


def _log_sum(x: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """logsumexp(x @ weight.T) [N]. A training step over a large vocabulary estimates it: `labels` (on the CPU) and the first
    ids, which byte pair encoding gives to what is frequent, count as they are, and a sample of the others for all of these."""
    if not torch.is_grad_enabled() or len(weight) <= 3 * SAMPLED:
        return _LogSumExp.apply(x, weight, chunk)
    read = torch.arange(len(weight)) < SAMPLED
    read[labels] = True
    others = (~read).nonzero()[:, 0]
    drawn = others[torch.randperm(len(others))[:SAMPLED]]
    own, rest = (weight[to_device(ids, weight.device)] for ids in (read.nonzero()[:, 0], drawn))
    share = len(drawn) / len(others)
    return torch.logaddexp(_LogSumExp.apply(x, own, chunk), _LogSumExp.apply(x, rest, chunk) - math.log(share))


def token_ctc(
    x: Tensor, blank: Tensor, weight: Tensor, frames: Sequence[int], transcripts: Sequence[Sequence[int]], chunk: int
) -> Tensor:
    """`F.ctc_loss` (reduction sum, zero_infinity) of the log-softmax over blank [N] and x @ weight.T [N, V], which never exists
    whole: clips of `frames` one after another, in fp32 but for products in the type of `weight` [V, W], which gets no gradient.
    In training, a large vocabulary is sampled.

    Of the vocabulary, the loss reads the labels of the batch alone. torch's gradient, as if they were a whole log-softmax, is
    exp(p) too large; less that (`extra`), autograd takes it through the sum over all ids.
    """
    fits = [len(ids) + sum(map(int.__eq__, ids, ids[1:])) <= n for n, ids in zip(frames, transcripts, strict=True)]
    spelt = [i for i, ids in enumerate(transcripts) if ids and fits[i]]
    if not spelt:
        return (x.sum() + blank.sum()) * 0
    x, blank = (torch.cat([clips[i] for i in spelt]) for clips in (x.split(list(frames)), blank.split(list(frames))))
    labels, index = torch.tensor([i - 1 for n in spelt for i in transcripts[n]]).unique(return_inverse=True)
    with torch.autocast(x.device.type, enabled=False):
        own = (x.to(weight.dtype) @ weight[to_device(labels, x.device)].T).float()
        norm = torch.logaddexp(_log_sum(x, weight, labels, chunk), blank)
    p = torch.cat([blank[:, None], own], 1) - norm[:, None]
    loss = ctc_loss(p, [frames[i] for i in spelt], index + 1, [len(transcripts[i]) for i in spelt])
    extra = p.exp().sum()
    return loss - extra + extra.detach()


def ctc_loss(scores: Tensor, frames: Sequence[int], ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """`F.ctc_loss` (Graves et al. 2006) of log-softmax scores [sum of frames, ids] of clips, summed; 0 for a clip too short.
    Under `fabric.deterministic` on the CPU: on a GPU its backward pass adds in any order."""
    device = torch.device("cpu") if torch.are_deterministic_algorithms_enabled() else scores.device
    padded, sizes = nn.utils.rnn.pad_sequence(list(scores.split(list(frames)))), (torch.tensor(frames), torch.tensor(lengths))
    loss = F.ctc_loss(padded.to(device), to_device(ids, device), *sizes, reduction="sum", zero_infinity=True)
    return loss.to(scores.device)


def sum_by(cell: Tensor, values: Tensor, cells: int) -> Tensor:
    """Sums of values [N] by their cells [N], [cells]; a GPU adds them in the same order every time, unlike `index_add_`."""
    return torch.where(cell == torch.arange(cells, device=cell.device)[:, None], values, 0).sum(1)


def _losses_and_gradients(
    heads: Heads, needs: Sequence[bool], targets: HeadTargets, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Compute, chunk by chunk of targets, the scaled sum, the loss of each target and the gradients of the heads' tensors.

    Where products are taken in half precision, their factor is softmax - target, within [-1, 1] (times `ratio`), not yet
    scaled: divided by the targets of a step it would vanish in fp16, whose scaler multiplies only in `backward`. The scale is
    applied after the products, in fp32, in which all gradients are then summed.

    Args:
        needs: which of the heads' tensors need a gradient.
        dtype: of the products.
    """
    index, scale, ratio = targets.index, targets.scale, targets.ratio
    last = len(index) - 1
    half = dtype in (torch.bfloat16, torch.float16)
    kept = torch.float32 if half else None
    same = heads.audio is heads.text
    grads = [torch.zeros_like(t, dtype=kept) if t is not None and n else None for t, n in zip(heads, needs, strict=True)]
    if same and needs[0] and needs[1]:
        grads[1] = grads[0]
    losses: list[Tensor] = []
    total = torch.zeros((), device=heads.text.device, dtype=torch.float32)
    with torch.no_grad(), torch.autocast(heads.text.device.type, enabled=False):
        for k, (where, target) in enumerate(zip(index, targets.ids, strict=True)):
            side = int(k != last)  # text is the first of each pair
            hidden, head, lows, ups = heads[side::2]
            d_hidden, d_head, d_low, d_ups = grads[side::2]
            assert hidden is not None and head is not None
            rows, size, first = targets.rows(k, head)
            weight, up = head[rows].to(dtype), None if ups is None else ups[rows].to(dtype)
            d_weight, d_up = (None if t is None else t[rows] for t in (d_head, d_ups))
            step = max(1, targets.chunk // size)
            for low in range(0, len(where), step):
                at, goal = where[low : low + step], target[low : low + step, None]
                inside = torch.ones_like(scale[k]) if half else scale[k]
                h = hidden[at].to(dtype)
                z = None if lows is None else lows[at].to(dtype)
                if ratio is not None:
                    part = ratio[k][low : low + step]
                    inside = inside * part[:, None]
                    # A target of factor 0 takes no part: its state may be nan. To leave it out would make the host wait.
                    h = torch.where(part[:, None] != 0, h, 0)
                    z = None if z is None else torch.where(part[:, None] != 0, z, 0)
                logits = h @ weight.T
                if z is not None and up is not None:
                    logits.addmm_(z, up.T)
                differentiated = any(t is not None for t in (d_hidden, d_weight, d_low, d_up))
                if targets.shards is not None:
                    loss, d_logits = _softmax_sharded(logits, goal - first, inside, differentiated, targets.shards)
                else:
                    softmax = _softmax_compiled if targets.compiled else _softmax
                    loss, d_logits = softmax(logits, goal, inside.expand_as(goal), differentiated)
                losses.append(loss)
                total += (loss if ratio is None else loss * part).sum() * scale[k]
                if d_logits is None:
                    continue
                for d_rows, matrix in ((d_hidden, weight), (d_low, up)):
                    if d_rows is not None and matrix is not None:
                        d_h = _product(d_logits, matrix).mul_(scale[k]) if half else d_logits @ matrix
                        d_rows.index_add_(0, at, d_h.to(d_rows.dtype))
                for d_matrix, inputs in ((d_weight, h), (d_up, None if d_up is None else z)):
                    if d_matrix is None or inputs is None:
                        continue
                    if d_matrix.dtype == dtype:
                        d_matrix.addmm_(d_logits.T, inputs)
                    elif half and d_matrix.is_cuda:
                        torch.ops.aten.addmm.dtype_out(d_matrix, d_logits.T, inputs, torch.float32, out=d_matrix)
                    else:
                        d_matrix.add_(_product(d_logits.T, inputs) if half else d_logits.T @ inputs)
                del d_logits, logits
            if half:
                for d_matrix in (d_weight, d_up):
                    if d_matrix is not None:
                        d_matrix.mul_(scale[k])
    if targets.shards is not None:  # each process has the gradient by the rows it holds
        for d_hidden in grads[: 1 if same else 2]:
            if d_hidden is not None:
                dist.all_reduce(d_hidden, group=targets.shards.group)
    each = torch.cat(losses) if losses else total.new_zeros(0)
    return total, each, [None if same and i == 1 else grad for i, grad in enumerate(grads)]


def _softmax(logits: Tensor, goal: Tensor, inside: Tensor, differentiated: bool) -> tuple[Tensor, Tensor | None]:
    """Losses [N] of logits [N, V], and their gradient times `inside` [N, 1] in the logits' type; overwrites fp32 logits."""
    dtype, logits = logits.dtype, logits.float()
    logits -= logits.amax(1, keepdim=True)
    right = logits.gather(1, goal)
    norm = logits.exp_().sum(1, keepdim=True)
    loss = (norm.log() - right).squeeze(1)
    if not differentiated:
        return loss, None
    d_logits = logits.mul_(inside / norm)
    d_logits.scatter_add_(1, goal, -inside.to(d_logits.dtype))
    return loss, d_logits.to(dtype)


def _softmax_sharded(
    logits: Tensor, goal: Tensor, inside: Tensor, differentiated: bool, shards: VocabularyShards
) -> tuple[Tensor, Tensor | None]:
    """`_softmax` of logits whose columns are shared by processes; a goal counts from this one's first column."""
    dtype, logits = logits.dtype, logits.float()
    here = (goal >= 0) & (goal < logits.shape[1])
    padded = torch.cat([logits, logits.new_full((len(logits), 1), -torch.inf)], 1)  # some processes have no column of a stream
    dist.all_reduce(largest := padded.amax(1, keepdim=True), dist.ReduceOp.MAX, group=shards.group)
    logits = padded - largest
    at = torch.where(here, goal, logits.shape[1] - 1)
    right = torch.where(here, logits.gather(1, at), 0)
    dist.all_reduce(both := torch.cat([logits.exp_().sum(1, keepdim=True), right], 1), group=shards.group)
    norm, right = both.split(1, 1)
    loss = (norm.log() - right).squeeze(1)
    if not differentiated:
        return loss, None
    d_logits = logits.mul_(inside / norm)
    d_logits.scatter_add_(1, at, torch.where(here, -inside, 0).to(d_logits.dtype))
    return loss, d_logits[:, :-1].to(dtype)


def _softmax_compiled(logits: Tensor, goal: Tensor, inside: Tensor, differentiated: bool) -> tuple[Tensor, Tensor | None]:
    """`_softmax` in one kernel; one is compiled for each vocabulary, whatever the number of rows."""
    for x in (logits, goal, inside):
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch._dynamo.mark_static(x, 1)
    return _compiled(_softmax_without_writes)(logits, goal, inside, differentiated)  # type: ignore[no-any-return]


_compiled = lru_cache(torch.compile)
"""`torch.compile`, once for each function."""


def _softmax_without_writes(logits: Tensor, goal: Tensor, inside: Tensor, differentiated: bool) -> tuple[Tensor, Tensor | None]:
    x = logits.float()
    x = x - x.amax(1, keepdim=True)
    norm = x.exp().sum(1, keepdim=True)
    loss = (norm.log() - x.gather(1, goal)).squeeze(1)
    if not differentiated:
        return loss, None
    here = torch.arange(x.shape[1], device=x.device) == goal
    return loss, (x.exp() * (inside / norm) - torch.where(here, inside, 0)).to(logits.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32 of two half-precision matrices: fp16 could not hold the sum over many rows."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float() if a.dtype == torch.float16 else (a @ b).float()
