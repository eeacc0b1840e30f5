"""The results of steps on their way to the host: one copy for each step.

Dimensions: B rows, K streams, A audio streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omni.generate.rows import RunnerRow, StepOutput
from omni.layout import Layout


class _Record(NamedTuple):
    rows: Sequence[RunnerRow | None]
    host: Tensor
    event: Any


class StepRecords:
    """Copies what `omni.generate.row_state.RowState.write` packed, and unpacks it when it is read."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pending: deque[_Record] = deque()
        self._hosts: dict[int, list[Tensor]] = {}  # pinned buffers that wait for a record, by their widths

    def add(self, rows: Sequence[RunnerRow | None], packed: Tensor, most: int, pinned: bool) -> None:
        """Copy the results of a step.

        Args:
            rows: those of `packed`, None for one that rests.
            packed: [B, K + A + 7], or [B, K + A + 7 + K] with log-probabilities.
            most: rows of the largest step.
            pinned: whether the copy is not waited for, but lands in pinned memory.
        """
        if not pinned:
            here = packed.numpy().copy() if packed.device.type == "cpu" else packed.clone()
            self._pending.append(_Record(rows, torch.as_tensor(here), None))
            return
        width = packed.shape[1]
        free = self._hosts.setdefault(width, [])
        if free and len(free[0]) != most:
            free.clear()  # the runner has grown
        host = free.pop() if free else torch.empty((most, width), dtype=torch.long).pin_memory()
        host[: len(rows)].copy_(packed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append(_Record(rows, host, event))

    def read(self, late: int) -> list[tuple[RunnerRow, StepOutput]]:
        """Outputs of the steps since the last call, without the newest `late` ones; of rows that are still there."""
        a, k = self._layout.n_audio, len(self._layout)
        out = []
        while len(self._pending) > late:
            record = self._pending.popleft()
            if record.event is not None:
                record.event.synchronize()
                self._hosts.setdefault(record.host.shape[1], []).append(record.host)
            known = record.host[: len(record.rows)]
            wide = known.shape[1] > k + a + 7
            logprobs = known[:, k + a + 7 :].to(torch.int32).view(torch.float32).tolist() if wide else [()] * len(known)
            for row, values, own in zip(record.rows, known.tolist(), logprobs, strict=True):
                if row is None or row.done or not row.live:
                    continue
                has_frame, text, has_text, done, needs_text, needs_audio, broken = values[k + a : k + a + 7]
                row.done, row.needs_text, row.needs_audio = bool(done), bool(needs_text), bool(needs_audio)
                frame = values[k : k + a] if has_frame else None
                written = text if has_text else None, row.done, bool(broken), tuple(own) if row.logprobs else None
                out.append((row, StepOutput(tuple(values[:k]), frame, *written)))
        return out
