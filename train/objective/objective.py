"""The objective: model and losses in one module, which is what Fabric wraps; its only entry is `forward`.

Next-token cross-entropy on every supervised stream (mini-omni's issues #61, #101, #117, #122), computed only where there is a
target and in chunks, so that full logits never exist; optionally a CTC loss (Graves et al. 2006) on the encoder. Losses are
returned as sums and counts, which are divided once by the counts of the whole step, over all processes.

Dimensions: R rows, T columns (or tasks of the task table), K streams, M balanced tasks, W width, V vocabulary, N features or
positions with a target, S segments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni.encoder.base import Encoder, frame_distances
from omni.lora.attach import BASE, low_rank, using
from omni.model.attention import multiplied_in
from omni.model.projector import TokenHead
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS
from omni.utils.hardware import to_device
from train.objective.config import NO_ALIGNMENT_HEAD, NO_TURN_HEAD, ObjectiveConfig, check_stream_weights, untrained
from train.objective.cross_entropy import (
    Heads,
    HeadTargets,
    ctc_loss,
    linear_cross_entropy,
    sum_by,
    task_cross_entropy,
    token_ctc,
    vocabulary_shards,
)

if TYPE_CHECKING:
    from train.balance.balancer import FeatureHook
    from train.data.batching.batch import Batch

HEADS = 3
"""Losses on the encoder: distillation, alignment and turns. Their counts of a step follow those of the K streams."""


class Losses(NamedTuple):
    """Losses of a packed batch, with the counts to divide them by.

    Attributes:
        total: scalar to call `backward` on: sum over streams of weight * sum / denominator, plus the losses on the encoder
            (distillation, alignment, turns).
        sums, counts: summed loss and number of targets by task and stream, [tasks, K], without graph.
        ctc_sum, ctc_count: summed alignment loss (of two spellings, the first `ctc_words` times) and number of its target ids,
            without graph.
        by_task: where tasks are balanced, the loss of each before its weight, and last that of the rest (losses of heads on
            the encoder, other tasks), [M + 1]; with its graph for `GraphLosses`.
        by_example: where asked for, summed loss and number of targets by segment of the batch, [2, S], without graph.
        turn_sum, turn_count: summed loss of the turn head and number of its labels, without graph; None without such a head.
        distill_sum, distill_count: summed loss of the distillation and number of its frames, without graph; None without one.
    """

    total: Tensor
    sums: Tensor
    counts: Tensor
    ctc_sum: Tensor
    ctc_count: Tensor
    by_task: Tensor | None = None
    by_example: Tensor | None = None
    turn_sum: Tensor | None = None
    turn_count: Tensor | None = None
    distill_sum: Tensor | None = None
    distill_count: Tensor | None = None


def cells(batch: Batch) -> Tensor:
    """Count the targets of a batch by task and stream, [T, K] float (on the CPU)."""
    task = batch.task.reshape(-1)
    counts = [torch.bincount(task[at], minlength=len(TASKS)) for at in batch.supervised]
    return torch.stack(counts, dim=1).float()


def targets(batch: Batch) -> Tensor:
    """Count the targets of each stream of a batch, and last the frames of its clips, the ids of its alignment loss and the
    labels of its turn head, [K + HEADS] float (on the CPU)."""
    on_encoder = sum(batch.frames), sum(len(ids) for ids in batch.transcripts), batch.turn_labels
    return torch.tensor([float(len(at)) for at in batch.supervised] + [float(count) for count in on_encoder])


def alignment_loss(logits: Tensor, frames: Sequence[int], transcripts: Sequence[Sequence[int]]) -> Tensor:
    """The CTC loss summed over the clips with a transcript; 0 without any. Of logits [sum of frames, ids] of all clips, the
    blank being 0."""
    spelt = [i for i, ids in enumerate(transcripts) if ids]
    if not spelt:
        return logits.sum() * 0
    clips = logits.split(list(frames))
    scores = torch.cat([clips[i] for i in spelt]).log_softmax(-1)
    ids = torch.tensor([i for ids in transcripts for i in ids])
    return ctc_loss(scores, [frames[i] for i in spelt], ids, [len(transcripts[i]) for i in spelt])


def turn_loss(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Binary cross-entropy of voice and end summed over all labels (1, 0, or -1 for none), of logits [sum of frames, 2]; 0
    without any."""
    if labels is None:
        return logits.sum() * 0
    each = F.binary_cross_entropy_with_logits(logits, labels.clamp_min(0).to(logits), reduction="none")
    return torch.where(labels >= 0, each, 0).sum()


class Objective(nn.Module):
    """Model and losses as one module. `forward(batch, denominators)` is the only entry (Fabric, DDP and FSDP wrap it alone).

    Args:
        teacher: what the encoder is distilled from.

    Attributes:
        compiled: compute the losses of a GPU's logits in one compiled kernel.
    """

    def __init__(self, model: SpeechModel, config: ObjectiveConfig | None = None, teacher: Teacher | None = None) -> None:
        super().__init__()
        self.model = model
        self.config = config or ObjectiveConfig()
        streams = len(model.layout)
        weights = self.config.stream_weights or (1.0,) * streams
        check_stream_weights(weights, streams)
        if self.config.ctc_weight > 0 and model.alignment_head is None:
            raise untrained("ctc", self.config.ctc_weight, NO_ALIGNMENT_HEAD)
        if self.config.turn_weight > 0 and model.turn_head is None:
            raise untrained("turn", self.config.turn_weight, NO_TURN_HEAD)
        if self.config.distill_weight > 0 and teacher is None:
            raise untrained("distill", self.config.distill_weight, "the objective has no teacher: give it one")
        self.teacher = teacher
        self.compiled = False
        self._classifier: Tensor | None = None
        # Not a buffer: a module in bf16 has its buffers rounded, and with them the weights of the losses.
        self.stream_weights = torch.tensor(weights, dtype=torch.float32)

    @cached_property
    def align_first(self) -> float:
        """Share of the budget in which only what hears is trained (`ObjectiveConfig.align_first`); 0 where nothing of it is."""
        first = self.config.align_first
        learns = first and not {p for p in self.model.parameters() if p.requires_grad} <= set(self._beyond_hearing())
        return first if learns else 0.0

    def idle(self, progress: float) -> list[nn.Parameter]:
        """Parameters that are not trained at this point of the budget (`align_first`): the optimizer must not change them."""
        if not self.encoder_alone(progress):
            return []
        return self._beyond_hearing()

    def _beyond_hearing(self) -> list[nn.Parameter]:
        """Parameters that no loss of what hears trains: the decoder's, the silence that it takes for a blank, and the
        projector's where no head reads its features."""
        head = self.model.alignment_head
        unread = [head.silence] if isinstance(head, TokenHead) else self.model.projector.parameters()
        return [*self.model.decoder.parameters(), *unread]

    def encoder_alone(self, progress: float) -> bool:
        """True where only what hears is run at this point of the budget."""
        return progress < self.align_first or self.align_first == 1

    def forward(
        self, batch: Batch, denominators: Tensor, progress: float = 1.0, task_losses: PlainLosses | None = None
    ) -> Losses:
        """Compute the losses of a packed batch.

        Args:
            denominators: targets of each stream in the whole step, over all processes, frames of its clips, ids of its
                alignment loss, and labels of its turn head, [K + HEADS].
            progress: share of the budget that is used, by which the alignment loss is scheduled.
            task_losses: how the tasks are weighed; all alike by default.
        """
        model, decoder, task_losses = self.model, self.model.decoder, task_losses or PlainLosses()
        features, (ctc, turn, distill) = self._encode(batch)
        first, final = self.config.ctc_weight, self.config.ctc_final
        scheduled = first if final is None else first + (final - first) * min(max(progress, 0.0), 1.0)
        weighted = scheduled * ctc / denominators[-2].clamp_min(1).to(ctc)
        aligned = ctc.new_full((), sum(map(len, batch.transcripts)), dtype=torch.float32)
        heard = {"ctc_sum": ctc.detach(), "ctc_count": aligned}
        if turn is not None:
            weighted = weighted + self.config.turn_weight * turn / denominators[-1].clamp_min(1).to(turn)
            heard |= {"turn_sum": turn.detach(), "turn_count": torch.full_like(aligned, batch.turn_labels)}
        if distill is not None:
            weighted = weighted + self.config.distill_weight * distill / denominators[-HEADS].clamp_min(1).to(distill)
            heard |= {"distill_sum": distill.detach(), "distill_count": torch.full_like(aligned, sum(batch.frames))}
        if not task_losses.aligned:  # a pass for some tasks alone
            weighted, heard = 0 * weighted, {name: 0 * value for name, value in heard.items()}
        if self.encoder_alone(progress) or task_losses.alignment_only:
            # Under DDP all parameters must take part in the backward pass, here times 0; sharded ones (FSDP2) may be left out.
            idle = [p for p in self._beyond_hearing() if p.requires_grad and not isinstance(p, DTensor)]
            unused_sum = sum(p.flatten()[:1].float().sum() for p in idle)
            total, none = weighted + 0 * (features.sum() + unused_sum), ctc.new_zeros(len(TASKS), len(model.layout))
            by_task = None
            if isinstance(task_losses, TaskLosses):
                by_task = torch.cat([weighted.new_zeros(len(task_losses)), weighted.detach()[None]])
            return Losses(total, none, none, by_task=by_task, **heard)
        features, left_out = model.read(features, batch.frames or [1], self._classifier)
        features, where = task_losses.at_features(batch, features), batch.feature_index
        hidden = model(batch.tokens, features, where, segments=batch.segments, packed=batch.packed, left_out=left_out)
        text = hidden.text.flatten(0, 1)
        audio = text if hidden.audio is hidden.text else hidden.audio.flatten(0, 1)
        index: Sequence[Tensor] = [at.to(text.device, non_blocking=True) for at in batch.supervised]
        scale = self.stream_weights.to(text.device, non_blocking=True) / denominators[:-HEADS].clamp_min(1).float()
        text_low, text_up = low_rank(decoder.text_head, text) or (None, None)
        audio_low, audio_up = low_rank(decoder.audio_head, audio) or (None, None)
        text_weight, audio_weight, shards = decoder.text_weight, decoder.audio_weight, None
        if isinstance(text_weight, DTensor) and isinstance(audio_weight, DTensor):
            shards = vocabulary_shards(text_weight, audio_weight)
            text_weight, audio_weight = text_weight.to_local(), audio_weight.to_local()
        heads = Heads(text, audio, text_weight, audio_weight, text_low, audio_low, text_up, audio_up)
        index, ratio = task_losses.split(batch, index)
        ids = [batch.targets[:, k].reshape(-1)[at] for k, at in enumerate(index)]
        chunk = self.config.chunk_on(text.is_cuda)
        goals = HeadTargets(decoder.audio_offsets, index, ids, scale, chunk, ratio, self.compiled and text.is_cuda, shards)
        return task_losses.sum(batch, heads, goals, weighted, heard)

    def _encode(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor | None, Tensor | None]]:
        """Features of the batch's clips, and the summed losses on the encoder: of alignment (0 without its head), of the turn
        head and of distillation, or None.

        A batch without clips still runs the encoder on one silent frame, times 0: every process then takes part in the same
        collectives, and every parameter in the backward pass.
        """
        model = self.model
        inputs, lengths, frames = batch.inputs, batch.input_lengths, batch.frames
        empty = len(frames) == 0
        if empty:
            encoder = model.config.encoder
            lengths, frames = [1 if batch.encoded else encoder.feature_frames(1)], [1]
            size = encoder.width if batch.encoded else encoder.bands
            inputs = torch.zeros(1, size, lengths[0], device=batch.tokens.device)
        if batch.encoded:
            heard = torch.cat([clip[:, :count].T for clip, count in zip(inputs, frames, strict=True)])
        else:
            heard = model.encoder.run(inputs, lengths, frames)
        if model.projector.tasks:
            count = sum(-(-n // model.projector.stack) for n in frames)
            features = model.projector(heard, frames, feature_tasks(batch, count))
        else:
            features = model.projector(heard, frames)
        if empty:
            features, heard = features * 0, heard * 0
        turn = None if model.turn_head is None else turn_loss(model.turn_head(heard).float(), batch.turn)
        distill = None
        if self.teacher is not None and self.config.distill_weight > 0:
            taught = self.teacher(model.encoder, inputs, lengths, frames)
            distill = frame_distances(heard, taught).sum() * (not empty)
        return features, (self._alignment(batch, heard, features, empty), turn, distill)

    def _alignment(self, batch: Batch, heard: Tensor, features: Tensor, empty: bool) -> Tensor:
        """The alignment loss summed over the clips with a transcript; 0 without alignment head."""
        model, frames = self.model, batch.frames
        if model.alignment_head is None:
            return heard.new_zeros(())
        if isinstance(model.alignment_head, TokenHead):
            x, blank = model.alignment_head(features)
            classifier = self._classifier_of(model.alignment_head, batch.transcripts, multiplied_in(features))
            if classifier is None:
                return (x.sum() + blank.sum()) * 0
            counts, chunk = [-(-n // model.projector.stack) for n in frames], self.config.chunk_on(features.is_cuda)
            return token_ctc(x, blank, classifier, counts, batch.transcripts, chunk)
        logits = model.alignment_head(heard).float()
        if empty:
            return logits.sum() * 0
        first = model.config.ctc_ids - model.config.ctc_sounds  # ids of the first spelling
        if not model.config.ctc_sounds:
            return alignment_loss(logits, frames, batch.transcripts)
        spelt = [[i for i in ids if i < first] for ids in batch.transcripts]
        heard_as = [[i - first for i in ids if i >= first] for ids in batch.transcripts]
        words = alignment_loss(logits[:, :first], frames, spelt)
        return self.config.ctc_words * words + alignment_loss(logits[:, first:], frames, heard_as)

    def _classifier_of(self, head: TokenHead, transcripts: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor | None:
        """The head's classifier, None where no transcript needs one yet. A CPU, for which it is a sixth of the loss, makes that
        of a frozen embedding once."""
        table = self.model.decoder.text_table  # in all processes, whatever their clips
        classifier = self._classifier
        if classifier is None and any(transcripts):
            classifier = head.classifier(table, dtype)
            self._classifier = None if table.requires_grad or table.is_cuda else classifier
        return classifier


TEACHER = "teacher."
"""Start of the names of a teacher's weights in the objective."""


class Teacher(nn.Module):
    """An encoder's first weights, which hear whole clips. It is frozen, and part of no checkpoint and no exported model.

    Args:
        encoder: with these weights, which are copied; None where the student has them itself, below its adapters.
        padded: it hears each clip in its window, the silence behind included, as it did where the weights came from.
    """

    def __init__(self, encoder: Encoder | None = None, padded: bool = False) -> None:
        super().__init__()
        self.encoder: Encoder | None = None
        self.padded = padded
        if encoder is not None:  # may be of fake tensors, which `deepcopy` alone would give a mode of their own
            copies: dict[int, Tensor] = {id(b): b.detach().clone() for b in encoder.buffers()}
            copies |= {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in encoder.parameters()}
            self.encoder = copy.deepcopy(encoder, copies)

    def forward(self, student: Encoder, features: Tensor, lengths: Sequence[int], frames: Sequence[int]) -> Tensor:
        """Frames [T, D] of a batch's clips without graph; for the arguments see `Encoder.forward`."""
        with using(BASE):
            return (student if self.encoder is None else self.encoder).hear_whole(features, lengths, frames, self.padded)


# --- how a pass weighs the tasks -----------------------------------------------------------------------------------------
#
# The objective is a sum over targets. A balanced task's loss is its part of that sum: the sum of all tasks at weight 1 and of
# the rest, which belongs to no balanced task, is the plain objective.


def cells_by_task(names: Sequence[str], tasks: Sequence[str], streams: int) -> Tensor:
    """Index of the balanced task that each task's targets on each stream belong to, [T, K]; M for none of them."""
    indices = [names.index(task) if task in names else len(names) for task in tasks]
    return torch.tensor(indices)[:, None].repeat(1, streams)


def mean_factors(cell: Tensor, counts: Tensor, tasks: int) -> Tensor:
    """Factors that turn a task's part of the streams' means into the sum of its own means by stream, [T, K]; of `cell` (see
    `cells_by_task`) and the step's targets by task and stream, [T, K]."""
    own = counts.new_zeros(tasks + 1, counts.shape[1]).scatter_add_(0, cell, counts)
    factor = counts.sum(0).clamp_min(1) / own.clamp_min(1)
    factor[-1] = 1
    return factor.gather(0, cell).float()


class PlainLosses:
    """All targets at weight 1. A plain class, as those below: Fabric converts the tensors of other containers.

    Attributes:
        by_example: the losses of the examples are summed, too.
        aligned: the alignment loss takes part.
        alignment_only: and nothing else does.
    """

    aligned = True
    alignment_only = False

    def __init__(self, by_example: bool = False) -> None:
        self.by_example = by_example

    def at_features(self, batch: Batch, features: Tensor) -> Tensor:
        """Called between encoder and decoder; returns the features [N, C]."""
        return features

    def split(self, batch: Batch, index: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        """Select the targets that take part, and their factors (None for 1 each): [N] for each stream.

        Args:
            index: flat positions of all targets.
        """
        return index, None

    def sum(self, batch: Batch, heads: Heads, targets: HeadTargets, alignment: Tensor, heard: Mapping[str, Tensor]) -> Losses:
        """Sum the losses of a batch.

        Args:
            targets: those of `split`.
            alignment: the weighted losses on the encoder; `heard`: their sums and counts, by their names in `Losses`.
        """
        total, each = linear_cross_entropy(heads, targets)
        examples = None
        if self.by_example:  # segments of the batch, see `Batch.names`
            bounds, values = batch.packed.ends.long(), (each.detach(), torch.ones_like(each))
            segment = torch.searchsorted(bounds, torch.cat(list(targets.index)), right=True) - 1
            examples = torch.stack([each.new_zeros(len(bounds) - 1).index_add_(0, segment, value) for value in values])
        return Losses(total + alignment, *sums_by_task(batch, targets.index, each), by_example=examples, **heard)


class TaskLosses(PlainLosses):
    """Balanced tasks, each with its weight.

    Args:
        cell: [T, K], see `cells_by_task`.
        weights: weight of each task's loss in the total, and last that of the rest, [M + 1] on the CPU. Targets of weight 0
            are left out altogether, and so is the alignment loss where the last is 0.
        ratio: factor of a target in its task's loss, [T, K], beside the objective's weights; 1 by default.
        hook: called between encoder and decoder.
        alignment_only: compute the alignment loss only.
    """

    def __init__(
        self,
        cell: Tensor,
        weights: Tensor,
        ratio: Tensor | None = None,
        *,
        hook: FeatureHook | None = None,
        alignment_only: bool = False,
    ) -> None:
        super().__init__()
        self.cell, self.weights = cell, weights.float()
        self.ratio = torch.ones(cell.shape) if ratio is None else ratio
        self.hook, self.alignment_only, self.aligned = hook, alignment_only, bool(self.weights[-1] != 0)

    def __len__(self) -> int:
        """Number of balanced tasks, M."""
        return len(self.weights) - 1

    def at_features(self, batch: Batch, features: Tensor) -> Tensor:
        if self.hook is None:
            return features
        own, task = self.cell[:, 0].to(batch.task.device, non_blocking=True), feature_tasks(batch, len(features))
        return self.hook(features, torch.where((task < 0) | (own[task] == len(self)), -1, own[task]))

    def split(self, batch: Batch, index: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        factors = self.ratio * self.weights[self.cell]
        task, table = batch.task.reshape(-1), to_device(factors, batch.task.device)
        if bool((factors == 0).any()):
            index = [to_device(at[factors[own, k] != 0], task.device) for k, (at, own) in enumerate(batch.places)]
        if bool((factors[factors != 0] == 1).all()):
            return index, None
        return index, [table[task[at], k] for k, at in enumerate(index)]

    def sum(self, batch: Batch, heads: Heads, targets: HeadTargets, alignment: Tensor, heard: Mapping[str, Tensor]) -> Losses:
        summed = super().sum(batch, heads, targets, alignment, heard)
        by_task = self.losses(summed.sums, targets.scale)
        return summed._replace(by_task=torch.cat([by_task[:-1], by_task[-1:] + alignment.detach()]))

    def losses(self, sums: Tensor, scale: Tensor) -> Tensor:
        """Losses of the tasks before their weights, and last that of the rest, [M + 1]; of sums [T, K] and the objective's
        scale [K]."""
        each = sums * scale * self.ratio.to(sums.device, non_blocking=True)
        return sum_by(self.cell.to(sums.device, non_blocking=True).flatten(), each.flatten(), len(self) + 1)


class GraphLosses(TaskLosses):
    """Balanced tasks whose losses keep their graphs (`task_cross_entropy`), and are multiplied by the weights after that."""

    def split(self, batch: Batch, index: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        task, table = batch.task.reshape(-1), self.ratio.to(batch.task.device, non_blocking=True)
        return index, [table[task[at], k] for k, at in enumerate(index)]

    def sum(self, batch: Batch, heads: Heads, targets: HeadTargets, alignment: Tensor, heard: Mapping[str, Tensor]) -> Losses:
        task, cell = batch.task.reshape(-1), self.cell.to(batch.task.device, non_blocking=True)
        cells = [cell[task[at], k] for k, at in enumerate(targets.index)]
        by_task, each = task_cross_entropy(heads, targets, cells, len(self) + 1)
        by_task = torch.cat([by_task[:-1], by_task[-1:] + alignment])
        total = (by_task * to_device(self.weights, by_task.device)).sum()
        return Losses(total, *sums_by_task(batch, targets.index, each), by_task=by_task, **heard)


def sums_by_task(batch: Batch, index: Sequence[Tensor], each: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the losses of all targets (`each`, streams one after another), and count them, by task and stream, [T, K]; `index`
    has their positions, [N] per stream."""
    task, sizes = batch.task.reshape(-1), [len(at) for at in index]
    here = torch.cat([task[at] for at in index]) == torch.arange(len(TASKS), device=each.device)[:, None]
    losses = torch.where(here, each.detach(), 0)
    sums = torch.stack([own.sum(1) for own in losses.split(sizes, 1)], 1)
    return sums, torch.stack([own.sum(1) for own in here.split(sizes, 1)], 1).to(each.dtype)


def feature_tasks(batch: Batch, features: int) -> Tensor:
    """Index into the table of tasks for each feature of a batch, [N] long, -1 for none."""
    index = batch.feature_index.reshape(-1)
    tasks = index.new_full((features + 1,), -1)
    tasks[torch.where(index >= 0, index, features)] = batch.task.reshape(-1)
    return tasks[:features]
