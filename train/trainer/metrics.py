"""Sums the figures of training steps over micro-batches, steps and processes until the next row of the log, refuses to go on
where they are not finite, and counts FLOPs, the numerator of MFU (`omni.utils.hardware` has the denominator).

Dimensions: T tasks, K streams.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omni.model.linears import numels
from omni.model.projector import ClipTransformer, TokenHead
from omni.model.speech_model import SpeechModel
from train.checkpoint.checkpointer import Checkpointer
from train.console.progress import counted
from train.data.batching.batch import Batch
from train.distributed.process_group import ProcessGroup
from train.objective.config import ObjectiveConfig
from train.objective.objective import Losses
from train.trainer.parts import Figures, Observer

GIVE_UP = 10
"""Consecutive steps that may be left out because their gradients are not finite."""
FIXED, LAST = 5, 4
"""Entries of `loss_sums` before those of tasks and streams: the objective, steps, alignment loss and count, steps left out; and
after them: loss and labels of the turn head, loss and frames of the distillation."""


def loss_sums(losses: Losses) -> Tensor:
    """The losses of a micro-batch and their counts as one vector [FIXED + 2 T K + LAST], with 0 steps."""
    none = torch.zeros((), device=losses.sums.device)
    fixed = losses.total.detach(), none, losses.ctc_sum, losses.ctc_count, none
    last = losses.turn_sum, losses.turn_count, losses.distill_sum, losses.distill_count
    first, heads = (torch.stack([none if x is None else x.detach().to(none) for x in part]) for part in (fixed, last))
    return torch.cat([first, losses.sums.flatten(), losses.counts.flatten(), heads])


def mean_losses(values: Tensor, tasks: Sequence[str], streams: Sequence[str]) -> dict[str, float]:
    """Losses per target of a sum of `loss_sums`: of every stream, the audio streams together (`loss/audio`), every task and the
    heads on the encoder; those without a target are left out."""
    sums, counts = values[FIXED:-LAST].view(2, len(tasks), len(streams))
    audio = [k for k, name in enumerate(streams) if name != "text"]
    columns = {**{name: [k] for k, name in enumerate(streams)}, "audio": audio}
    parts = {name: (sums[:, own].sum(), counts[:, own].sum()) for name, own in columns.items()}
    parts |= {name: (sums[t].sum(), counts[t].sum()) for t, name in enumerate(tasks)}
    parts |= {"alignment": (values[2], values[3]), "turn": (values[-4], values[-3]), "distill": (values[-2], values[-1])}
    return {f"loss/{name}": float(total / n) for name, (total, n) in parts.items() if n > 0}


class StepMetrics(Observer):
    """Sums of losses and counts, kept on the device so that no step waits for it, and the work and time of the steps.

    Attributes:
        peak: FLOP/s that all devices can do, for `mfu`; None where it is not known.
        values: of `loss_sums`, since the last row.
        work: time steps, FLOPs and seconds of training, since the last row.
        shown: values and work when figures were last shown.
        measured: seconds of training of the last row.
        since: when the training went on last; None where it rests (between steps, for validation and saving).
        norm: of the last step's gradients.
        skipped_in_a_row, skipped: steps left out one after another up to the last, and since the start of this process.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        streams: Sequence[str],
        device: torch.device | str,
        group: ProcessGroup,
        peak: float | None = None,
    ) -> None:
        self.tasks, self.streams, self.group, self.peak = tuple(tasks), tuple(streams), group, peak
        self.values = torch.zeros(FIXED + 2 * len(tasks) * len(streams) + LAST, device=device)
        self.work = torch.zeros(3, dtype=torch.float64)
        self.shown = torch.zeros(len(self.values), dtype=torch.float64), self.work
        self.measured = 0.0
        self.since: float | None = None
        self.norm = self.skipped_in_a_row = self.skipped = torch.zeros((), device=device)

    def add(self, losses: Losses) -> None:
        """Adds one micro-batch's losses ([T, K] sums and counts)."""
        self.values += loss_sums(losses).to(self.values)

    def step(self, positions: float, flops: float, skipped: Tensor, norm: Tensor) -> None:
        """Counts an optimizer step, left out where `skipped` is 1 and not 0, with its gradients' norm; positions and FLOPs
        are of all processes."""
        self.norm, self.skipped_in_a_row = norm, (self.skipped_in_a_row + skipped) * skipped
        self.skipped = self.skipped + skipped
        self.values[1] += 1.0 / self.group.data_world
        self.values[4] += skipped / self.group.data_world
        self.work = self.work + torch.tensor([positions, flops, 0.0], dtype=torch.float64)

    def on_step_begin(self, step: int) -> None:
        self.since = time.perf_counter()

    def on_log(self, step: int, figures: Figures) -> None:
        figures.update(self.figures())

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        self._count_time()
        self.since = None

    def _count_time(self) -> None:
        if self.since is not None:
            now = time.perf_counter()
            self.work = self.work + torch.tensor([0.0, 0.0, now - self.since], dtype=torch.float64)
            self.since = now

    def state(self) -> list[list[float]]:
        """The sums of every process as plain data, those of a tensor-parallel group once, for a checkpoint; all processes must
        call it."""
        every: list[list[float] | None] = self.group.gather(self.values.tolist() if self.group.counts else None)
        return [sums for sums in every if sums is not None]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from a checkpoint's sums: each process from its own, as sums in float32 depend on their order; where there
        were more or fewer processes, the first one has the sums of all."""
        if any(len(sums) != len(self.values) for sums in state):
            return
        total = torch.tensor(state, dtype=torch.float64).sum(0)
        self.values.zero_()
        if len(state) == self.group.data_world:
            self.values += torch.tensor(state[self.group.data_rank]).to(self.values)
        elif self.group.data_rank == 0:
            self.values += total.to(self.values)
        self.shown = total, torch.zeros_like(self.work)

    def figures(self, shown: bool = False) -> dict[str, float]:
        """Mean losses and speed since the last row of the log; all processes must call it. Streams and tasks without a target
        are left out. With `shown`, for the screen alone, they count from the last call, and nothing is taken from the next
        row."""
        values, before = self.group.sum(self.values), self.shown  # waits for the device, so it comes before the clock is read
        self._count_time()
        work, self.shown = self.work, (values, self.work)
        if shown:
            values, work = values - before[0], work - before[1]
        else:
            self.values.zero_()
            self.work, self.measured = torch.zeros_like(work), float(work[2])
            self.shown = torch.zeros_like(values), self.work
        steps = max(1.0, round(float(values[1]), 3))
        out = {"loss": float(values[0]) / steps, **mean_losses(values, self.tasks, self.streams)}
        if values[4] > 0:
            out["steps_skipped"] = round(float(values[4]))
        positions, flops, seconds = work.tolist()
        if seconds > 0:
            out["tokens_per_second"] = positions / seconds
            if flops and self.peak:
                out["mfu"] = flops / seconds / self.peak
        return out


def base_rate(optimizer: torch.optim.Optimizer) -> float:
    """The largest learning rate of any parameter, now."""
    return float(max(group["lr"] for group in optimizer.param_groups))


@dataclass
class StepHealth(Observer):
    """Adds learning rate, time and the gradients' norm to the log; says which steps are left out, and refuses to go on
    (UserError) where losses are not finite, or the gradients of `GIVE_UP` steps one after another.

    Attributes:
        scaled: 16-mixed finds its scale by steps that fail, which are neither counted nor said.
        first_step: of this start.
        said_from: how many steps are left out when that is said again.
    """

    checkpointer: Checkpointer
    meter: StepMetrics
    scaled: bool
    first_step: int
    said_from: int = 1

    def on_log(self, step: int, figures: Figures) -> None:
        self._say_skipped(step)
        self.checkpointer.check_finite("loss", figures["loss"])
        norm = float(self.meter.norm)
        if not self.scaled and self.meter.skipped_in_a_row >= GIVE_UP:
            self.checkpointer.check_finite(f"gradients' norm of {GIVE_UP} steps one after another", norm)
        position = self.checkpointer.position
        figures.update(lr=base_rate(self.checkpointer.training.optimizer), seconds=position.seconds, gradient_norm=norm)

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        if not figures and self.checkpointer.fabric.device.type == "cpu":  # elsewhere it would wait for the device
            self._say_skipped(step)

    def _say_skipped(self, step: int) -> None:
        """Says that steps are left out: at the first, and when they are twice as many."""
        skipped = 0 if self.scaled else round(float(self.meter.skipped))
        if skipped < self.said_from:
            return
        self.said_from = 2 * skipped
        number = "" if skipped == 1 else f" ({skipped} steps so far)"
        self.checkpointer.say(
            f"step {step}: left out, because its gradients are not finite{number}; {GIVE_UP} one after another end the run"
            if float(self.meter.skipped_in_a_row)
            else f"step {step}: {counted(skipped, 'step')} left out so far: gradients not finite"
        )


class StepFlops:
    """FLOPs of a forward and backward pass of a packed batch, counted as Kaplan et al. 2020 do: 2 a weight and position
    forward, twice that backward; attention by the pairs that see each other; heads only where a target is. A frozen
    encoder costs its forward pass only, or nothing where the rows keep its frames, and a teacher too; the table by which
    features with a transcript are read as tokens has no gradient. Recomputation by checkpointing is not counted as work."""

    def __init__(self, model: SpeechModel, objective: ObjectiveConfig | None = None) -> None:
        decoder, encoder, projector, sizes = model.decoder, model.encoder, model.projector, numels(model)
        self.widths = [s.vocabulary * decoder.config.width for s in model.layout.streams]
        self.per_position = sum(sizes[f"decoder.{n}"] for n, p in decoder.named_parameters() if "blocks." in n and p.ndim == 2)
        c = decoder.config
        self.per_pair = (c.layers + c.post_layers) * c.heads * c.head_size
        self.per_frame = sum(sizes[f"encoder.{n}"] for n, p in encoder.named_parameters() if p.ndim >= 2)
        self.per_feature = sum(sizes[f"projector.{n}"] for n, p in projector.named_parameters() if p.ndim >= 2)
        self.stack, self.encoder, self.feature_pair = projector.stack, model.config.encoder, 0
        if isinstance(projector.project, ClipTransformer):
            self.feature_pair = len(projector.project.blocks) * c.width
        learns = [any(p.requires_grad for p in part.parameters()) for part in (encoder, projector)]
        self.passes, self.feature_passes = 6 if learns[0] else 2, 6 if any(learns) else 2
        self.per_spelt = 4 * self.widths[model.layout.n_audio] * isinstance(model.alignment_head, TokenHead)
        self.align_first = objective.align_first if objective is not None else 0.0
        if objective is not None and objective.distill_weight > 0:
            self.passes += 2

    def __call__(self, batch: Batch, targets: Tensor, progress: float = 1.0) -> float:
        """FLOPs of a batch at a point of the budget; targets: supervised positions of each stream, [K] and more (not used)."""
        features = [-(-n // self.stack) for n in batch.frames]
        frames = [self.encoder.positions] * len(features) if self.encoder.fixed_length else batch.frames
        projected = self.per_feature * sum(features) + 2.0 * self.feature_pair * sum(n * n for n in features)
        hearing = self.feature_passes * projected
        hearing += self.per_spelt * sum(n for n, ids in zip(features, batch.transcripts, strict=True) if ids)
        if not batch.encoded:
            encoded = self.per_frame * sum(frames) + 2.0 * self.encoder.attention_size * sum(n * n for n in frames)
            hearing += self.passes * encoded
        if progress < self.align_first or self.align_first == 1:
            return hearing
        heads = sum(6.0 * w * n for w, n in zip(self.widths, targets.tolist(), strict=False))
        pairs = float((batch.lengths.double() ** 2).sum()) / 2
        decoder = 6.0 * self.per_position * batch.positions + 12.0 * self.per_pair * pairs
        return heads + decoder + hearing
