"""Sums the figures of training steps over micro-batches, steps and processes until the next row of the log, and counts FLOPs,
the numerator of MFU (`omni.utils.hardware` has the denominator)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from omni.model.linears import numels
from omni.model.speech_model import SpeechModel
from train.distributed.process_group import ProcessGroup
from train.objective.objective import Losses
from train.trainer.parts import Observer

if TYPE_CHECKING:
    from train.data.batching.batch import Batch
    from train.objective.config import ObjectiveConfig


class StepMetrics(Observer):
    """Sums of losses and counts, kept on the device so that no step waits for it. Dimensions: T tasks, K streams.

    Attributes:
        peak: FLOP/s that all devices can do, for `mfu`; None where it is not known.
        norm: of the last step's gradients.
        skipped_in_a_row, skipped: steps left out one after another up to the last, and since the start of this process.
        measured: seconds of training of the last `figures`.
    """

    FIXED = 5
    """Leading entries of the sums: the objective, steps, the alignment loss and its count, and steps left out."""
    LAST = 4
    """Last entries: loss and labels of the turn head, loss and frames of the distillation."""

    def __init__(
        self,
        tasks: Sequence[str],
        streams: Sequence[str],
        device: torch.device | str,
        group: ProcessGroup,
        peak: float | None = None,
    ) -> None:
        self.tasks, self.streams, self.group, self.peak = tuple(tasks), tuple(streams), group, peak
        self.cells = len(self.tasks) * len(self.streams)
        self.values = torch.zeros(self.FIXED + 2 * self.cells + self.LAST, device=device)
        self.positions = 0.0
        self.flops = 0.0
        self.seconds = self.measured = 0.0
        self.norm = self.skipped_in_a_row = self.skipped = torch.zeros((), device=device)
        self._running_since: float | None = None
        self._shown: tuple[Tensor, float, float, float] | None = None  # sums, positions, FLOPs and seconds at the last look

    def add(self, losses: Losses) -> None:
        """Adds one micro-batch's losses ([T, K] sums and counts)."""
        none = losses.total.new_zeros(())
        fixed = torch.stack([losses.total.detach(), none, losses.ctc_sum.to(none), losses.ctc_count.to(none), none])
        others = losses.turn_sum, losses.turn_count, losses.distill_sum, losses.distill_count
        last = torch.stack([none if x is None else x.to(none) for x in others])
        self.values += torch.cat([fixed, losses.sums.flatten(), losses.counts.flatten(), last]).to(self.values)

    def step(self, positions: float, flops: float, skipped: Tensor, norm: Tensor) -> None:
        """Counts an optimizer step, left out where `skipped` is 1 and not 0, with its gradients' norm; positions and FLOPs
        are of all processes."""
        self.norm, self.skipped_in_a_row = norm, (self.skipped_in_a_row + skipped) * skipped
        self.skipped = self.skipped + skipped
        self.values[1] += 1.0 / self.group.data_world
        self.values[4] += skipped / self.group.data_world
        self.positions += positions
        self.flops += flops

    def start(self) -> None:
        """Starts the clock of training, which runs until `pause` (for validation and saving)."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    @property
    def running(self) -> bool:
        """True from `start` to `pause`."""
        return self._running_since is not None

    def pause(self) -> None:
        if self._running_since is not None:
            self.seconds += time.perf_counter() - self._running_since
            self._running_since = None

    def on_step_begin(self, step: int) -> None:
        self.start()

    def on_log(self, step: int, figures: dict[str, float]) -> None:
        figures.update(self.figures())

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        self.pause()

    def total(self) -> Tensor:
        """The sums over all processes, on the CPU; all processes must call it."""
        return self.group.sum(self.values)

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
        self._shown = (total, 0.0, 0.0, 0.0)

    def figures(self) -> dict[str, float]:
        """Mean losses and speed since the last call; all processes must call it. Streams and tasks without a target are
        left out."""
        values = self.total()  # waits for the device, so it comes before the clock is read
        self.pause()
        out = self._figures(values, self.positions, self.flops, self.seconds)
        self.values.zero_()
        self.measured = self.seconds
        self.positions = self.flops = self.seconds = 0.0
        self._shown = None
        self.start()
        return out

    def look(self) -> dict[str, float]:
        """The figures since the last look, `figures` or `restore`, for the screen alone: nothing is taken from the next
        `figures`. All processes must call it."""
        values = self.total()
        self.pause()
        now = (values, self.positions, self.flops, self.seconds)
        sums, positions, flops, seconds = self._shown or (torch.zeros_like(values), 0.0, 0.0, 0.0)
        self._shown = now
        self.start()
        return self._figures(values - sums, now[1] - positions, now[2] - flops, now[3] - seconds)

    def _figures(self, values: Tensor, positions: float, flops: float, seconds: float) -> dict[str, float]:
        steps = max(1.0, round(float(values[1]), 3))
        out = {"loss": float(values[0]) / steps}
        sums, counts = values[self.FIXED : -self.LAST].view(2, len(self.tasks), len(self.streams))
        out.update(means(sums, counts, self.tasks, self.streams))
        if values[3] > 0:
            out["loss/alignment"] = float(values[2] / values[3])
        if values[-3] > 0:
            out["loss/turn"] = float(values[-4] / values[-3])
        if values[-1] > 0:
            out["loss/distill"] = float(values[-2] / values[-1])
        if values[4] > 0:
            out["steps_skipped"] = round(float(values[4]))
        if seconds > 0:
            out["tokens_per_second"] = positions / seconds
            if flops and self.peak:
                out["mfu"] = flops / seconds / self.peak
        return out


def means(sums: Tensor, counts: Tensor, tasks: Sequence[str], streams: Sequence[str]) -> dict[str, float]:
    """Losses per target from sums and counts [T, K]: of every stream, of the audio streams together (`loss/audio`) and of every
    task; those without a target are left out."""
    audio = [k for k, name in enumerate(streams) if name != "text"]
    by_stream = [(name, sums[:, k].sum(), counts[:, k].sum()) for k, name in enumerate(streams)]
    by_task = [(name, sums[t].sum(), counts[t].sum()) for t, name in enumerate(tasks)]
    together = ("audio", sums[:, audio].sum(), counts[:, audio].sum())
    return {f"loss/{name}": float(s / n) for name, s, n in [*by_stream, together, *by_task] if n > 0}


class BalanceTally:
    """Averages weights, norms and cosines since the last row, and counts how often each task was absent or its gradient zero.

    Attributes:
        values: by figure: sum, and number of steps that had it; plain data, for a checkpoint.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """Adds a step's `BalanceReport.figures`."""
        for name, value in figures.items():
            total = self.values.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += 1

    def figures(self) -> dict[str, float]:
        """The row of the log; the sums start again from zero."""
        row = {name: total if name.startswith(("absent/", "zero/")) else total / n for name, (total, n) in self.values.items()}
        self.values = {}
        return row


class StepFlops:
    """FLOPs of a forward and backward pass of a packed batch, counted as Kaplan et al. 2020 do: 2 a weight and position
    forward, twice that backward; attention by the pairs that see each other; heads only where a target is. A frozen
    encoder costs its forward pass only, and a teacher too. Recomputation by checkpointing is not counted as work."""

    def __init__(self, model: SpeechModel, objective: ObjectiveConfig | None = None) -> None:
        decoder, encoder, sizes = model.decoder, model.encoder, numels(model)
        self.widths = [s.vocabulary * decoder.config.width for s in model.layout.streams]
        self.per_position = sum(sizes[f"decoder.{n}"] for n, p in decoder.named_parameters() if "blocks." in n and p.ndim == 2)
        c = decoder.config
        self.per_pair = (c.layers + c.post_layers) * c.heads * c.head_size
        matrices = sum(sizes[f"encoder.{n}"] for n, p in encoder.named_parameters() if p.ndim >= 2)
        self.per_frame = matrices + sum(sizes[f"projector.{n}"] for n, p in model.projector.named_parameters() if p.ndim >= 2)
        self.passes = 6 if any(p.requires_grad for p in encoder.parameters()) else 2
        self.alone = objective is not None and objective.encoder_alone
        if objective is not None and objective.distill_weight > 0:
            self.passes += 2
        self.encoder_pair = model.config.encoder.attention_size

    def __call__(self, batch: Batch, targets: Tensor) -> float:
        """FLOPs of a batch; targets: supervised positions of each stream, [K] and more (which are not used)."""
        frames = float(sum(batch.frames))
        frame_pairs = float(sum(n * n for n in batch.frames))
        hearing = self.passes * (self.per_frame * frames + 2.0 * self.encoder_pair * frame_pairs)
        if self.alone:
            return hearing
        heads = sum(6.0 * w * n for w, n in zip(self.widths, targets.tolist(), strict=False))
        pairs = float((batch.lengths.double() ** 2).sum()) / 2
        decoder = 6.0 * self.per_position * batch.positions + 12.0 * self.per_pair * pairs
        return heads + decoder + hearing
