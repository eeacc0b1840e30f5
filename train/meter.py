"""What a training step measures, summed over micro-batches, steps and processes until the next row of the log."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from train.objective import Losses
from train.parallel import Team


class Meter:
    """Sums of losses and counts, kept on the device so that no step waits for it.

    Dimensions: T tasks, K streams.
    """

    FIXED = 5
    """Leading entries of the sums: the objective, steps, the alignment loss and its count, and steps left out."""

    def __init__(self, tasks: Sequence[str], streams: Sequence[str], device: torch.device | str, team: Team) -> None:
        self.tasks, self.streams, self.team = tuple(tasks), tuple(streams), team
        self.cells = len(self.tasks) * len(self.streams)
        self.values = torch.zeros(self.FIXED + 2 * self.cells, device=device)
        self.positions = 0.0
        self.flops = 0.0
        self.seconds = 0.0
        self._running_since: float | None = None

    def add(self, losses: Losses) -> None:
        """Take in one micro-batch's losses ([T, K] sums and counts)."""
        none = losses.total.new_zeros(())
        fixed = torch.stack([losses.total.detach(), none, losses.ctc_sum.to(none), losses.ctc_count.to(none), none])
        self.values += torch.cat([fixed, losses.sums.flatten(), losses.counts.flatten()]).to(self.values)

    def step(self, positions: float, flops: float, skipped: Tensor) -> None:
        """One optimizer step is done, or left out where `skipped` is 1 and not 0; positions and FLOPs are of all processes."""
        self.values[1] += 1.0 / self.team.world
        self.values[4] += skipped / self.team.world
        self.positions += positions
        self.flops += flops

    def start(self) -> None:
        """From here on time passes for training, until `pause` (for validation and saving)."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def pause(self) -> None:
        if self._running_since is not None:
            self.seconds += time.perf_counter() - self._running_since
            self._running_since = None

    def total(self) -> Tensor:
        """The sums over all processes, on the CPU; all processes must call it."""
        return self.team.sum(self.values)

    def state(self) -> list[float]:
        """The sums as plain data, for a checkpoint; all processes must call it."""
        return self.total().tolist()

    def restore(self, state: Sequence[float]) -> None:
        """Continue from a checkpoint's sums (which the first process holds for all)."""
        if len(state) == len(self.values):
            self.values.zero_()
            if self.team.first:
                self.values += torch.tensor(state, device=self.values.device, dtype=self.values.dtype)

    def figures(self) -> dict[str, float]:
        """Mean losses and speed since the last call; all processes must call it. Streams and tasks without a target are
        left out."""
        values = self.total()  # waits for the device, so it comes before the clock is read
        self.pause()
        steps = max(1.0, round(float(values[1]), 3))
        out = {"loss": float(values[0]) / steps}
        sums, counts = values[self.FIXED :].view(2, len(self.tasks), len(self.streams))
        for name, s, n in zip(self.streams, sums.sum(0).tolist(), counts.sum(0).tolist(), strict=True):
            if n > 0:
                out[f"loss/{name}"] = s / n
        for name, s, n in zip(self.tasks, sums.sum(1).tolist(), counts.sum(1).tolist(), strict=True):
            if n > 0:
                out[f"loss/{name}"] = s / n
        if values[3] > 0:
            out["loss/alignment"] = float(values[2] / values[3])
        if values[4] > 0:
            out["steps_skipped"] = round(float(values[4]))
        if self.seconds > 0:
            out["tokens_per_second"] = self.positions / self.seconds
            out["flops_per_second"] = self.flops / self.seconds
        self.values.zero_()
        self.positions = self.flops = self.seconds = 0.0
        self.start()
        return out
