"""The step runner: advances the rows of one cache together, one column each.

One step feeds every row's column, passes the hidden state to the heads, samples, and asks the layout's cursor
for the column that is fed next. All results of a step are packed into one tensor and copied to the host once; on a
GPU that copy is read one step late, so that the device always has work. A row that is done writes nothing
(position -1) from then on, without waiting for the host to notice.

Rows are slots of the cache: `begin` puts answers into neighbouring slots, `leave` empties a slot, and a row
that is dropped leaves a smaller batch. On CUDA a step is captured as a graph for each shape it takes
(`_Plan`); the tensors a graph reads and writes belong to the runner and keep their addresses. The eager path
runs the same code.

Dimensions: B rows, K streams, A audio streams, W width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from omni.cursor import Cursor
from omni.generate.rows import RunnerRow, Start, StepOutput
from omni.generate.sampling import Mode, Sampler
from omni.kv_cache import KVCache
from omni.lora.attach import active_edits, attached_names, removals
from omni.lora.selection import RowSelection, Selection, names_in, using
from omni.model.decoder import Hidden
from omni.model.speech_model import SpeechModel


class _Plan(NamedTuple):
    """Everything that determines the shape of a step: the key of a captured graph.

    Attributes:
        first, stop: the slots that are fed.
        text, audio: the slots (from, to) for which the head of the kind is computed; None where none needs it.
        coupled: some rows take their text from another row.
        visible: number of slots of the cache that are read.
        selection: adapters and edits of all rows, in the order of their numbers; one alone, without numbers, where every row
            has it.
        mixed: rows differ in their selections.
        everywhere: edits that act on every row besides.
        removals: number of adapters removed so far, where any are active: a graph reads the weights of those that it was
            captured with.
    """

    first: int
    stop: int
    text: tuple[int, int] | None
    audio: tuple[int, int] | None
    coupled: bool
    audio_mode: Mode
    text_mode: Mode
    visible: int
    selection: tuple[RowSelection, ...] = ()
    mixed: bool = False
    everywhere: tuple[str, ...] = ()
    removals: int = 0


class _Record(NamedTuple):
    rows: list[RunnerRow | None]
    host: Tensor
    event: Any


P = ParamSpec("P")
R = TypeVar("R")


def _on_device(method: Callable[Concatenate[Runner, P], R]) -> Callable[Concatenate[Runner, P], R]:
    """Run a method with the runner's GPU as CUDA's current device, to which streams, events, graphs and pinned memory belong,
    wherever the tensors are."""

    @wraps(method)
    def here(self: Runner, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._cuda:
            return method(self, *args, **kwargs)
        with torch.cuda.device(self._position.device):
            return method(self, *args, **kwargs)

    return here


class Runner:
    """Steps the rows of one cache together.

    Args:
        model: the model; it is not changed.
        rows, length: size of the cache; `length` is capped by the decoder's context.
        chunk: longest piece that is prefilled at once.
        graph: capture the steps as CUDA graphs; by default on CUDA only.
        compile: run the decoder of a step through `torch.compile`.
    """

    def __init__(
        self,
        model: SpeechModel,
        rows: int,
        length: int,
        *,
        chunk: int = 512,
        graph: bool | None = None,
        compile: bool = False,
    ) -> None:
        self.model, self.layout = model, model.layout
        self.length = min(length, model.config.decoder.context)
        self.chunk = min(chunk, self.length)
        self.cache = model.make_cache(rows, self.length, chunk=self.chunk)
        self.rows: list[RunnerRow | None] = [None] * rows
        device = model.device
        self._cuda = device.type == "cuda"
        self._graph = self._cuda if graph is None else graph and self._cuda
        self._decode: Any = torch.compile(model) if compile else model

        a, k = self.layout.n_audio, len(self.layout)
        self._column = self.layout.ids("pad").to(device).repeat(rows, 1)
        self._position = torch.full((rows,), -1, dtype=torch.long, device=device)
        self._partner = torch.arange(rows, device=device)
        self._number = torch.zeros(rows, dtype=torch.long, device=device)  # of each row's selection, from 1; 0 for none
        self._selection: list[RowSelection] = []
        self._removals = 0
        self._cursor = Cursor.start(self.layout, [False] * rows, [False] * rows, device)
        self._cursor.done.fill_(True)
        self._sampler = Sampler(self.layout, rows, device)
        self._packed = torch.zeros(rows, k + a + 7, dtype=torch.long, device=device)
        self._pad = self.layout.ids("pad").to(device)
        self._pending: deque[_Record] = deque()
        self._hosts: list[Tensor] = []  # pinned buffers that wait for a record
        self._views: dict[tuple[int, int], KVCache] = {}
        self._graphs: dict[_Plan, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    # --- rows come and go ---------------------------------------------------------------------------------------------

    @_on_device
    @torch.inference_mode()
    def begin(self, first: int, hidden: Hidden, starts: Sequence[Start]) -> list[RunnerRow]:
        """Start answers in the slots from `first` on and write their first columns.

        Args:
            hidden: hidden state of each prompt's last column, [B, 1, W].
            starts: one per row.
        """
        slots = slice(first, first + len(starts))
        rows = [RunnerRow(first + i, s.position, s.text, s.audio, s.partner, s.selection) for i, s in enumerate(starts)]
        fresh = Cursor.start(self.layout, [s.text for s in starts], [s.audio for s in starts], self._position.device)
        for name in Cursor.TENSORS:
            getattr(self._cursor, name)[slots] = getattr(fresh, name)
        device = self._position.device
        self._position[slots] = torch.tensor([s.position for s in starts], device=device)
        partners = [row.slot if row.partner is None else row.partner for row in rows]
        self._partner[slots] = torch.tensor(partners, device=device)
        self._number[slots] = torch.tensor([self._numbered(s.selection) for s in starts], device=device)
        for row, start in zip(rows, starts, strict=True):
            self.rows[row.slot] = row
            self._sampler.set(row.slot, start.settings, start.key)
        plan = self._plan(first, first + len(starts))
        self._write(plan, hidden)
        self._record(plan)
        return rows

    def _numbered(self, selection: RowSelection) -> int:
        if selection is None:
            return 0
        if not any(self.rows) and (selection not in self._selection or self._removals != removals(self.model)):
            self._forget()
        if selection not in self._selection:
            self._selection.append(selection)
        return self._selection.index(selection) + 1

    def _forget(self) -> None:
        """Drop the numbers and captured graphs of adapters and edits that the model no longer has."""
        there = attached_names(self.model)
        self._selection = [selection for selection in self._selection if there.issuperset(names_in(selection))]
        self._removals = removals(self.model)
        kept = [
            plan
            for plan in self._graphs
            if there.issuperset({*plan.everywhere, *_all_names(plan.selection)})
            and (not plan.selection or plan.removals == self._removals)
        ]
        self._graphs = {plan: self._graphs[plan] for plan in kept}

    def leave(self, row: RunnerRow) -> None:
        """Free the row's slot; the content of the cache stays."""
        if row.live:
            row.live = False
            self.rows[row.slot] = None
            self._sampler.clear(row.slot)
            self._position[row.slot] = -1
            self._cursor.done[row.slot] = True

    def compact(self) -> None:
        """Move the last rows into empty slots before them, so that the batch gets smaller.

        Where the batch only ever halves, few graphs are captured.
        """
        live = [row for row in self.rows if row is not None]
        if any(row.partner is not None for row in live):
            return
        width = max((row.slot + 1 for row in live), default=0)
        if self._graph and 2 * len(live) > width:
            return
        holes = [slot for slot in range(len(live)) if self.rows[slot] is None]
        for slot, row in zip(holes, [r for r in live if r.slot >= len(live)], strict=True):
            self._move(row, slot)

    @torch.inference_mode()
    def _move(self, row: RunnerRow, slot: int) -> None:
        source = row.slot
        self.cache.copy_row(source, slot, row.position)
        tensors = [self._column, self._position, self._number, *(getattr(self._cursor, n) for n in Cursor.TENSORS)]
        for tensor in tensors:
            tensor[slot] = tensor[source]
        self._partner[slot] = slot
        self._sampler.move(source, slot)
        self._sampler.clear(source)
        self._position[source] = -1
        self._cursor.done[source] = True
        self.rows[slot], self.rows[source] = row, None
        row.slot = slot

    # --- the step -----------------------------------------------------------------------------------------------------

    @_on_device
    @torch.inference_mode()
    def step(self) -> None:
        """Feed every live row its column and write the next; each must have room (`RunnerRow.position < length`)."""
        live = [row for row in self.rows if row is not None]
        if not live:
            return
        plan = self._plan(0, max(row.slot for row in live) + 1)
        self._view(plan).clean(plan.visible or None)
        if self._graph:
            if plan not in self._graphs:
                self._graphs[plan] = self._capture(plan)
            self._graphs[plan].replay()
        else:
            self._forward(plan)
        self._record(plan)

    @_on_device
    def results(self, flush: bool = False) -> list[tuple[RunnerRow, StepOutput]]:
        """Outputs of the steps since the last call; on a GPU without the newest step, unless `flush` waits for it."""
        late = 1 if self._cuda and not flush else 0
        a, k = self.layout.n_audio, len(self.layout)
        out = []
        while len(self._pending) > late:
            record = self._pending.popleft()
            if record.event is not None:
                record.event.synchronize()
                self._hosts.append(record.host)
            for row, values in zip(record.rows, record.host[: len(record.rows)].tolist(), strict=True):
                if row is None or row.done or not row.live:
                    continue
                has_frame, text, has_text, done, needs_text, needs_audio, broken = values[k + a :]
                row.done, row.needs_text, row.needs_audio = bool(done), bool(needs_text), bool(needs_audio)
                frame = values[k : k + a] if has_frame else None
                out.append((row, StepOutput(tuple(values[:k]), frame, text if has_text else None, row.done, bool(broken))))
        return out

    def _plan(self, first: int, stop: int) -> _Plan:
        live = [row for row in self.rows[first:stop] if row is not None]
        coupled = any(row.partner is not None and row.needs_text for row in live)
        text = _span([row.slot if row.partner is None else row.partner for row in live if row.needs_text])
        audio = _span([row.slot for row in live if row.needs_audio])
        if not coupled:  # all slots: fewer different plans as rows come and go, and a product of more rows costs no more
            text, audio = text and (first, stop), audio and (first, stop)
        audio_mode, text_mode = self._sampler.modes(range(first, stop))
        visible = self._visible(max(row.position for row in live) + 1)
        mode = Mode()
        used = {row.selection for row in live}
        mixed = len(used) > 1
        selection = tuple(self._selection) if mixed else tuple(one for one in used if one is not None)
        modes = audio_mode if audio else mode, text_mode if text else mode
        edits, removed = active_edits(self.model), removals(self.model) if selection else 0
        return _Plan(first, stop, text, audio, coupled, *modes, visible, selection, mixed, edits, removed)

    def _visible(self, positions: int) -> int:
        """Number of slots that a step reads, rounded up to few different numbers (fewer still where each costs a graph)."""
        if self.cache.ring:
            return 0
        if self._graph:
            return min(max(256, 1 << (positions - 1).bit_length()), self.length)
        return min(-(-positions // 64) * 64, self.length)

    def _forward(self, plan: _Plan) -> None:
        rows, view = slice(plan.first, plan.stop), self._view(plan)
        view.limit(plan.visible or None)
        column, position = self._column[rows, :, None], self._position[rows, None]
        decode = self.model if plan.selection or plan.everywhere else self._decode  # the compiled decoder knows neither
        with using(self._selection_of(plan, plan.first, plan.stop)):
            hidden = decode(column, input_pos=position, cache=view)
        self._write(plan, hidden)

    def _view(self, plan: _Plan) -> KVCache:
        """View of the cache with the rows of a step."""
        rows = plan.first, plan.stop
        if rows not in self._views:
            self._views[rows] = self.cache.select(range(*rows))
        return self._views[rows]

    def _selection_of(self, plan: _Plan, first: int, stop: int) -> Selection | None:
        """Selection of adapters and edits for some slots."""
        if not plan.selection:
            return None
        return Selection(plan.selection, self._number[first:stop] if plan.mixed else None)

    def _write(self, plan: _Plan, hidden: Hidden) -> None:
        """Sample the rows' next columns from hidden states [B, 1, W], in place."""
        rows = slice(plan.first, plan.stop)
        cursor, decoder, a = self._cursor.select(rows), self.model.decoder, self.layout.n_audio
        sampled = self._pad.repeat(plan.stop - plan.first, 1)
        broken = torch.zeros_like(cursor.done)
        if plan.audio:
            own, here = slice(*plan.audio), slice(plan.audio[0] - plan.first, plan.audio[1] - plan.first)
            with using(self._selection_of(plan, *plan.audio)):
                logits = decoder.audio_logits(Hidden(hidden.text[here], hidden.audio[here]))[:, -1]
            sampled[here, :a] = self._sampler.audio(logits, own, cursor.step[here], plan.audio_mode)
            broken[here] |= cursor.needs_audio[here] & broken_rows(hidden.audio[here], logits)
        if plan.text:
            own, here = slice(*plan.text), slice(plan.text[0] - plan.first, plan.text[1] - plan.first)
            with using(self._selection_of(plan, *plan.text)):
                logits = decoder.text_logits(Hidden(hidden.text[here], hidden.audio[here]))[:, -1]
            text = self._sampler.text(logits, own, cursor.step[here], plan.text_mode)
            odd = broken_rows(hidden.text[here], logits)
            if plan.coupled:
                writer = (self._partner[rows] - own.start).clamp(0, len(text) - 1)
                text, odd = text[writer], odd[writer]
            sampled[:, a] = text
            broken |= cursor.needs_text & odd
        after, push = cursor.push(sampled)
        for name in ("step", "text_ended", "audio_end", "history", "done"):
            getattr(cursor, name).copy_(getattr(after, name))
        self._column[rows] = push.column
        if plan.audio_mode.penalty or plan.text_mode.penalty:
            self._sampler.remember(push.column, rows)
        position = self._position[rows]
        position.copy_(torch.where(after.done, -1, position + 1))
        flags = (push.has_frame, push.text, push.has_text, push.done, after.needs_text, after.needs_audio, broken)
        self._packed[rows] = torch.cat([push.column, push.frame, *(f[:, None] for f in flags)], dim=1)

    def _record(self, plan: _Plan) -> None:
        """Copy the results of a step to the host, in its only copy."""
        rows, packed = self.rows[plan.first : plan.stop], self._packed[plan.first : plan.stop]
        for row in rows:
            if row is not None:
                row.position += 1
        if self._cuda:
            host = self._hosts.pop() if self._hosts else torch.empty(self._packed.shape, dtype=torch.long).pin_memory()
            host[: len(rows)].copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host, event = packed.clone(), None
        self._pending.append(_Record(list(rows), host, event))

    def _capture(self, plan: _Plan) -> torch.cuda.CUDAGraph:
        """Capture a step as a graph. The warm-up runs have every row done, so that they write to the spare slot only."""
        state = [self._column, self._position, self._packed, *(getattr(self._cursor, n) for n in Cursor.TENSORS)]
        if self._sampler.seen is not None:
            state.append(self._sampler.seen)
        saved = [tensor.clone() for tensor in state]
        self._position.fill_(-1)
        self._cursor.done.fill_(True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._forward(plan)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._forward(plan)
        self._pool = self._pool or graph.pool()
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        return graph


def broken_rows(hidden: Tensor, logits: Tensor) -> Tensor:
    """Rows [B] whose logits [B, V] are not all finite numbers, or whose hidden state [B, 1, W] is zero throughout: its norm was
    infinite. Takes a seventh of the time of an argmax, and makes no copy."""
    finite = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()
    return ~finite | (hidden[:, -1] == 0).all(-1)


def _all_names(several: Sequence[RowSelection]) -> list[str]:
    return [name for selection in several for name in names_in(selection)]


def _span(slots: Sequence[int]) -> tuple[int, int] | None:
    """First slot and the one after the last; None for no slots."""
    return (min(slots), max(slots) + 1) if slots else None
