"""The rows of the step runner: start, state on the host and on the device, and the results of steps on their way to the host.

Dimensions: B rows, K streams, A audio streams, W width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omni.cpu import compiled
from omni.generate.options import Sampling
from omni.generate.sampling import Array, Mode, Sampler, broken_rows, log_probabilities, write_rows
from omni.layout import Cursor, Layout
from omni.lora.attach import RowSelection, Selection, using
from omni.model.decoder import Decoder, Hidden
from omni.utils.hardware import to_device


@dataclass(frozen=True)
class Start:
    """Start of a row's answer.

    Attributes:
        position: of the prompt's last column in the cache.
        settings: sampling settings of each stream.
        key: key of its random numbers (`seed_key`).
        partner: slot of the row that writes its text (text assist), None where it writes itself.
        selection: the adapter and the edits that act on the row, None for the model's active ones.
    """

    text: bool
    audio: bool
    position: int
    settings: tuple[Sampling, ...]
    key: int = 0
    partner: int | None = None
    selection: RowSelection = None
    logprobs: bool = False


@dataclass(eq=False)
class RunnerRow:
    """State of a row from its first column until it leaves.

    Attributes:
        slot: its row of the cache.
        position: position at which its next column will be fed (counted on the host, so it may be one past the end of a
            row that is done).
        needs_text, needs_audio: whether it still needs each head.
        live: whether it has not left yet; done: whether its answer is complete.
    """

    slot: int
    start: Start
    position: int
    needs_text: bool
    needs_audio: bool
    live: bool = True
    done: bool = False


class StepOutput(NamedTuple):
    """Output of one step for one row: the column that is fed next, a finished frame, a text token, whether the answer is done,
    whether it is broken (logits that it was drawn from are not finite, so that its ids mean nothing), and, where they were
    asked for, the log-probabilities of the K sampled ids (of forced ids they mean nothing)."""

    column: tuple[int, ...]
    frame: list[int] | None
    text: int | None
    done: bool
    broken: bool = False
    logprobs: tuple[float, ...] | None = None


class StepPlan(NamedTuple):
    """Everything that determines the shape of a step: the key of a captured graph.

    Attributes:
        slots: the slots that are fed, in their order; neighbours unless they are few of many.
        text, audio: places in `slots` for which the head of the kind is computed.
        coupled: some rows take their text from another row; resting: some of the slots rest.
        visible: number of slots of the cache that are read.
        selection: adapters and edits of all rows, in the order of their numbers; one alone, without numbers, where every row
            has it.
        mixed: rows differ in their selections; everywhere: edits that act on every row besides.
    """

    slots: tuple[int, ...]
    text: tuple[int, ...]
    audio: tuple[int, ...]
    coupled: bool
    resting: bool
    audio_mode: Mode
    text_mode: Mode
    visible: int
    selection: tuple[RowSelection, ...] = ()
    mixed: bool = False
    everywhere: tuple[str, ...] = ()
    logprobs: bool = False


class RowState:
    """The state of B rows, which are empty at first.

    Attributes:
        column: fed next, [B, K]; position: of that column, [B], -1 for none.
        partner: row whose text each takes, [B]; number: of its adapters and edits, from 1, 0 for none, [B].
        resting: rows between those of a step that are not fed, [B].
        packed, wide: results of the newest step, [B, K + A + 7], and with log-probabilities [B, K + A + 7 + K].
    """

    def __init__(self, layout: Layout, rows: int, device: torch.device) -> None:
        self.layout = layout
        a, k = layout.n_audio, len(layout)
        self._pad = layout.ids("pad").to(device)
        self.column = self._pad.repeat(rows, 1)
        self.position = torch.full((rows,), -1, dtype=torch.long, device=device)
        self.partner = torch.arange(rows, device=device)
        self.number = torch.zeros(rows, dtype=torch.long, device=device)
        self.resting = torch.zeros(rows, dtype=torch.bool, device=device)
        cursor = Cursor.start(layout, [False] * rows, [False] * rows, device)
        self.cursor = cursor.select(slice(None))  # makes its constants now, and not in the first answer
        self.cursor.done.fill_(True)
        self.sampler = Sampler(layout, rows, device)
        self._of_cursor = [getattr(self.cursor, name) for name in Cursor.TENSORS]
        self._arrays: list[list[Array]] = []  # the cursor's tensors with its constants, and the state's; of a CPU
        self.packed = torch.zeros(rows, k + a + 7, dtype=torch.long, device=device)
        self.wide = torch.zeros(rows, k + a + 7 + k, dtype=torch.long, device=device)

    def _carried(self) -> list[Tensor]:
        """The tensors over rows that a step reads or writes, besides the sampler's and the cache's."""
        return [self.column, self.position, self.partner, self.number, *self._of_cursor]

    def written(self) -> list[Tensor]:
        """All tensors that a step writes, besides the cache's."""
        seen = self.sampler.seen
        return [*self._carried(), self.packed, self.wide, *([] if seen is None else [seen])]

    # --- rows come and go ---------------------------------------------------------------------------------------------

    def begin(self, slots: Sequence[int], starts: Sequence[Start], selections: Sequence[int]) -> None:
        """Write the starts of answers into rows. `selections`: numbers of their adapters and edits."""
        fresh = Cursor.start(self.layout, [s.text for s in starts], [s.audio for s in starts])
        partners = [slot if s.partner is None else s.partner for slot, s in zip(slots, starts, strict=True)]
        drawn = self.sampler.prepare(slots, [s.settings for s in starts], [s.key for s in starts])
        own = (torch.tensor(values) for values in ([s.position for s in starts], partners, list(selections)))
        values = [*own, *(getattr(fresh, name) for name in Cursor.TENSORS), *drawn]
        write_rows([*self._carried()[1:], *self.sampler.targets], slots, values)

    @torch.inference_mode()
    def idle(self, slot: int | None = None) -> None:
        """Make the step pass over a row, by default over all. Fills: to write one number by its index waits for a GPU."""
        rows = slice(None)
        if slot is not None:
            self.sampler.row_modes[slot] = (Mode(), Mode())
            rows = slice(slot, slot + 1)
        self.position[rows].fill_(-1)
        self.cursor.done[rows].fill_(True)

    def take(self, other: RowState) -> None:
        """Copy the rows of another one, which has fewer."""
        for new, before in zip(self._carried(), other._carried(), strict=True):
            new[: len(before)] = before
        self.sampler.take(other.sampler)

    # --- the step -----------------------------------------------------------------------------------------------------

    def index(self, slots: tuple[int, ...]) -> slice | Tensor:
        """Index of some rows: a slice where they are neighbours."""
        first, count = slots[0], len(slots)
        if slots == tuple(range(first, first + count)):
            return slice(first, first + count)
        return to_device(torch.tensor(slots), self.position.device)

    def rest(self, slots: tuple[int, ...], stepped: set[int]) -> None:
        """Have all rows in `slots` rest but those that are stepped."""
        rest = torch.tensor([slot not in stepped for slot in slots])
        self.resting[self.index(slots)] = to_device(rest, self.resting.device)

    def fed(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """The columns [B, K, 1] that a step feeds, and their positions [B, 1]."""
        rows = self.index(plan.slots)
        if self.position.device.type == "cpu":  # in each of PyTorch's operations the thread gives up the interpreter's lock
            index = rows if isinstance(rows, slice) else rows.numpy()
            now = self.position.numpy()[index]
            if plan.resting:
                now = np.where(self.resting.numpy()[index], -1, now)
            return torch.from_numpy(self.column.numpy()[index][:, :, None]), torch.from_numpy(now[:, None])
        position = self.position[rows]
        if plan.resting:
            position = torch.where(self.resting[rows], -1, position)
        return self.column[rows][:, :, None], position[:, None]

    def selection(self, plan: StepPlan, rows: slice | Tensor) -> Selection | None:
        """Selection of adapters and edits for some rows."""
        if not plan.selection:
            return None
        return Selection(plan.selection, self.number[rows] if plan.mixed else None)

    def write(self, plan: StepPlan, hidden: Hidden, decoder: Decoder) -> None:
        """Sample the rows' next columns from hidden states [B, 1, W], in place."""
        rows, slots, a = self.index(plan.slots), plan.slots, self.layout.n_audio
        simple = not (any((*plan.audio_mode, *plan.text_mode)) or plan.coupled or plan.logprobs)
        if simple and self.position.device.type == "cpu" and hidden.text.dtype == torch.float32:
            self._write_likeliest(plan, rows, hidden, decoder)
            return
        sampled = self._pad.expand(len(slots), -1).clone()
        nonfinite = torch.zeros(2, len(slots), dtype=torch.bool, device=sampled.device)  # of audio and text
        logprobs = torch.zeros(sampled.shape, device=sampled.device) if plan.logprobs else None
        if plan.audio:
            own, here = self.index(tuple(slots[i] for i in plan.audio)), self.index(plan.audio)
            with using(self.selection(plan, own)):
                logits = decoder.audio_logits(Hidden(hidden.text[here], hidden.audio[here]))[:, -1]
            sampled[here, :a] = self.sampler.draw(logits, own, self.cursor.step[own], plan.audio_mode, text=False)
            if logprobs is not None:
                logprobs[here, :a] = log_probabilities(self.sampler.choices(logits, text=False), sampled[here, :a])
            nonfinite[0, here] = broken_rows(hidden.audio[here], logits)
        if plan.text:
            own, here = self.index(tuple(slots[i] for i in plan.text)), self.index(plan.text)
            with using(self.selection(plan, own)):
                logits = decoder.text_logits(Hidden(hidden.text[here], hidden.audio[here]))[:, -1]
            text = self.sampler.draw(logits, own, self.cursor.step[own], plan.text_mode, text=True)
            drawn = [text, broken_rows(hidden.text[here], logits)]
            if logprobs is not None:
                drawn.append(log_probabilities(self.sampler.choices(logits, text=True), text))
            if plan.coupled:
                written = torch.arange(own.start, own.stop, device=text.device) if isinstance(own, slice) else own
                writer = torch.searchsorted(written, self.partner[rows]).clamp_max(len(text) - 1)
                drawn = [values[writer] for values in drawn]
            sampled[:, a:], nonfinite[1] = drawn[:2]
            if logprobs is not None:
                logprobs[:, a:] = drawn[2]
        if sampled.device.type == "cpu":
            self._push(plan, rows, sampled.numpy(), nonfinite.numpy())
        else:
            self._push_tensors(plan, rows, sampled, nonfinite)
        if plan.audio_mode.penalty or plan.text_mode.penalty:
            self.sampler.remember(self.column[rows], rows)
        if logprobs is not None:
            self.wide[rows] = torch.cat([self.packed[rows], logprobs.view(torch.int32).long()], dim=1)

    def _write_likeliest(self, plan: StepPlan, rows: slice | Tensor, hidden: Hidden, decoder: Decoder) -> None:
        """`write` on a CPU where no row draws, by few of PyTorch's operations (see `fed`)."""
        a, count = self.layout.n_audio, len(plan.slots)
        sampled, nonfinite = np.repeat(self._pad.numpy()[None], count, 0), np.zeros((2, count), np.bool_)
        with using(self.selection(plan, rows)):
            if plan.audio:
                logits = decoder.audio_logits(hidden)
                self.sampler.likeliest(hidden.audio, logits, sampled[:, :a], nonfinite[0], text=False)
            if plan.text:
                logits = decoder.text_logits(hidden)
                self.sampler.likeliest(hidden.text, logits, sampled[:, a:], nonfinite[1], text=True)
        self._push(plan, rows, sampled, nonfinite)

    def _push(self, plan: StepPlan, rows: slice | Tensor, sampled: Array, nonfinite: Array) -> None:
        """Push sampled ids [B, K] to the rows' cursors and note what came of it; compiled."""
        index = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows.numpy()
        rests = self.resting.numpy()[index if plan.resting else slice(0)]
        if not self._arrays:
            tensors = (*self._of_cursor, *self.cursor.constants), (self.column, self.position, self.packed)
            self._arrays = [[tensor.numpy() for tensor in part] for part in tensors]
        cursor, state = self._arrays
        compiled.push(index, rests, sampled, nonfinite, *cursor, self.layout.fill == "pad", *state)  # type: ignore[call-arg]

    def _push_tensors(self, plan: StepPlan, rows: slice | Tensor, sampled: Tensor, nonfinite: Tensor) -> None:
        """`_push` on any device, without waiting for it."""
        cursor = self.cursor.select(rows)
        broken = (cursor.needs_audio & nonfinite[0]) | (cursor.needs_text & nonfinite[1])
        after, push = cursor.push(sampled)
        names = ("step", "text_ended", "audio_end", "history", "done")
        targets = [self.column, self.position, *(getattr(self.cursor, name) for name in names)]
        position = torch.where(after.done, -1, self.position[rows] + 1)
        for target, value in zip(targets, [push.column, position, *(getattr(after, name) for name in names)], strict=True):
            rest = self.resting[rows].view(-1, *[1] * (value.ndim - 1))
            target[rows] = torch.where(rest, target[rows], value) if plan.resting else value
        flags = (push.has_frame, push.text, push.has_text, push.done, after.needs_text, after.needs_audio, broken)
        self.packed[rows] = torch.cat([push.column, push.frame, *(flag[:, None] for flag in flags)], dim=1)


class StepRecords:
    """Copies what `omni.generate.rows.RowState.write` packed, and unpacks it when it is read."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pending: deque[tuple[Sequence[RunnerRow | None], Tensor, Any]] = deque()  # with what to wait for
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
            self._pending.append((rows, torch.as_tensor(here), None))
            return
        width = packed.shape[1]
        free = self._hosts.setdefault(width, [])
        if free and len(free[0]) != most:
            free.clear()  # the runner has grown
        host = free.pop() if free else torch.empty((most, width), dtype=torch.long).pin_memory()
        host[: len(rows)].copy_(packed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((rows, host, event))

    def read(self, late: int) -> list[tuple[RunnerRow, StepOutput]]:
        """Outputs of the steps since the last call, without the newest `late` ones; of rows that are still there."""
        a, k = self._layout.n_audio, len(self._layout)
        out = []
        while len(self._pending) > late:
            rows, host, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
                self._hosts.setdefault(host.shape[1], []).append(host)
            known = host[: len(rows)]
            wide = known.shape[1] > k + a + 7
            logprobs = known[:, k + a + 7 :].to(torch.int32).view(torch.float32).tolist() if wide else [()] * len(known)
            for row, values, own in zip(rows, known.tolist(), logprobs, strict=True):
                if row is None or row.done or not row.live:
                    continue
                has_frame, text, has_text, done, needs_text, needs_audio, broken = values[k + a : k + a + 7]
                row.done, row.needs_text, row.needs_audio = bool(done), bool(needs_text), bool(needs_audio)
                frame = values[k : k + a] if has_frame else None
                written = text if has_text else None, row.done, bool(broken), tuple(own) if row.start.logprobs else None
                out.append((row, StepOutput(tuple(values[:k]), frame, *written)))
        return out
