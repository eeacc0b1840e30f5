"""The step runner: advances the rows of one cache together, one column each.

One step feeds every row's column, passes the hidden state to the heads, samples, and asks the layout's cursor
for the column that is fed next. All results of a step are packed into one tensor and copied to the host once; on a
GPU that copy is read one step late, so that the device always has work. A row that is done writes nothing
(position -1) from then on, without waiting for the host to notice.

Rows are slots of the cache: `begin` starts answers in any slots, `leave` empties a slot, and a step advances all rows or some
of them. Few rows among many are gathered; many are stepped in place, with the others between them resting: these are fed at
position -1 and keep their state. On CUDA a step is captured as a graph for each shape it takes (`_Plan`); the tensors a graph
reads and writes belong to the runner and keep their addresses. The eager path runs the same code.

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
from omni.generate.graphs import Graphs, coming, powers
from omni.generate.rows import RunnerRow, Start, StepOutput
from omni.generate.sampling import Mode, Sampler, broken_rows, log_probabilities
from omni.generate.staging import Staging
from omni.hardware import to_device
from omni.kv_cache import KVCache
from omni.lora.attach import active_edits, attached_names, changes
from omni.lora.selection import RowSelection, Selection, all_names, using
from omni.model.decoder import Hidden
from omni.model.speech_model import SpeechModel


class _Plan(NamedTuple):
    """Everything that determines the shape of a step: the key of a captured graph.

    Attributes:
        slots: the slots that are fed, in their order; neighbours unless they are few of many.
        text, audio: places in `slots` for which the head of the kind is computed.
        coupled: some rows take their text from another row.
        resting: some of the slots rest.
        visible: number of slots of the cache that are read.
        selection: adapters and edits of all rows, in the order of their numbers; one alone, without numbers, where every row
            has it.
        mixed: rows differ in their selections.
        everywhere: edits that act on every row besides.
        logprobs: some row wants the log-probabilities of its ids.
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
        device = model.device
        self._cuda = device.type == "cuda"
        self._graph = self._cuda if graph is None else graph and self._cuda
        self._decode: Any = torch.compile(model) if compile else model
        self._chunk = chunk
        self._selection: list[RowSelection] = []
        self._changes = changes(model)
        self._pad = self.layout.ids("pad").to(device)
        self._pending: deque[_Record] = deque()
        self.rows: list[RunnerRow | None] = []
        self._allocate(rows, length)

    def _allocate(self, rows: int, length: int) -> None:
        """Make the cache and the state of all rows, which are empty."""
        model, device = self.model, self._pad.device
        self.length = min(length, model.config.decoder.context)
        self.chunk = min(self._chunk, model.config.decoder.context)
        self.cache = model.make_cache(rows, self.length, chunk=self.chunk)
        self.rows += [None] * (rows - len(self.rows))
        a, k = self.layout.n_audio, len(self.layout)
        self._column = self._pad.repeat(rows, 1)
        self._position = torch.full((rows,), -1, dtype=torch.long, device=device)
        self._partner = torch.arange(rows, device=device)
        self._number = torch.zeros(rows, dtype=torch.long, device=device)  # of each row's selection, from 1; 0 for none
        self._resting = torch.zeros(rows, dtype=torch.bool, device=device)
        self._cursor = Cursor.start(self.layout, [False] * rows, [False] * rows, device)
        self._cursor = self._cursor.select(slice(None))  # makes its constants now, and not in the first answer
        self._cursor.done.fill_(True)
        self._sampler = Sampler(self.layout, rows, device)
        of_cursor = [getattr(self._cursor, name) for name in Cursor.TENSORS]
        self._staging = Staging([self._position, self._partner, self._number, *of_cursor, *self._sampler.targets])
        self._packed = torch.zeros(rows, k + a + 7, dtype=torch.long, device=device)
        self._wide = torch.zeros(rows, k + a + 7 + k, dtype=torch.long, device=device)  # the same, and log-probabilities
        self._hosts: dict[int, list[Tensor]] = {}  # pinned buffers that wait for a record, by their width
        self._views: dict[tuple[int, ...], KVCache] = {}
        self._graphs = Graphs()

    def _state(self) -> list[Tensor]:
        """The tensors over rows that a step reads or writes, besides the sampler's and the cache's."""
        cursor = (getattr(self._cursor, name) for name in Cursor.TENSORS)
        return [self._column, self._position, self._partner, self._number, *cursor]

    # --- rows come and go ---------------------------------------------------------------------------------------------

    @_on_device
    @torch.inference_mode()
    def begin(self, slots: Sequence[int], hidden: Hidden, starts: Sequence[Start]) -> list[RunnerRow]:
        """Start answers in empty slots and write their first columns.

        Args:
            hidden: hidden state of each prompt's last column, [B, 1, W].
            starts: one per slot.
        """
        rows = [
            RunnerRow(n, s.position, s.text, s.audio, s.partner, s.selection, logprobs=s.logprobs)
            for n, s in zip(slots, starts, strict=True)
        ]
        fresh = Cursor.start(self.layout, [s.text for s in starts], [s.audio for s in starts])
        partners = [row.slot if row.partner is None else row.partner for row in rows]
        selected = []
        for row in rows:
            selected.append(self._numbered(row.selection))
            self.rows[row.slot] = row
        numbers = [s.position for s in starts], partners, selected
        drawn = self._sampler.prepare(slots, [s.settings for s in starts], [s.key for s in starts])
        of_cursor = [getattr(fresh, name) for name in Cursor.TENSORS]
        self._staging.write(slots, [*(torch.tensor(own) for own in numbers), *of_cursor, *drawn])
        plan = self._plan(rows, tuple(slots))
        self._write(plan, hidden)
        self._record(plan, rows)
        return rows

    def _numbered(self, selection: RowSelection) -> int:
        if selection is None:
            return 0
        if not any(self.rows) and selection not in self._selection:
            self._forget()
        if selection not in self._selection:
            used = {row.selection for row in self.rows if row is not None}
            free = next((i for i, other in enumerate(self._selection) if other not in used), len(self._selection))
            self._selection[free : free + 1] = [selection]
        return self._selection.index(selection) + 1

    def _forget(self) -> None:
        """Drop the numbers and captured graphs of adapters and edits that the model no longer has."""
        there = attached_names(self.model)
        self._selection = [selection for selection in self._selection if there.issuperset(all_names([selection]))]
        self._graphs.keep(lambda plan: there.issuperset({*plan.everywhere, *all_names(plan.selection)}))

    def leave(self, row: RunnerRow) -> None:
        """Free the row's slot; the content of the cache stays."""
        if row.live:
            row.live = False
            self._empty(row.slot)

    @torch.inference_mode()
    def _empty(self, slot: int) -> None:
        """Make the step pass over a slot. Fills: to write one number by its index waits for a GPU."""
        self.rows[slot] = None
        self._sampler.clear(slot)
        self._position[slot : slot + 1].fill_(-1)
        self._cursor.done[slot : slot + 1].fill_(True)

    @torch.no_grad()
    def grow(self, rows: int, length: int) -> None:
        """Make room for that many rows and positions, where there is less; results must have been read before. Captured graphs
        are dropped."""
        old, count = self._state(), len(self.rows)
        rows, length = max(rows, count), max(length, self.length)
        cache, sampler = self.cache, self._sampler
        self._allocate(rows, length)
        for new, before in zip(self._state(), old, strict=True):
            new[:count] = before
        self._sampler.take(sampler)
        self.cache.take(cache, count)

    @_on_device
    @torch.inference_mode()
    def warm_up(self, starts: Sequence[Start], positions: int | None = None) -> int:
        """Capture the steps of answers like these before anybody waits for one, and return how many: of every width up to
        theirs, with both heads and with each alone. One takes 0.1 to 0.3 s (estimated). Nothing where steps are not captured.

        Args:
            starts: from slot 0 on; their positions do not count.
            positions: the largest position that will be read; the cache's length by default.
        """
        if any(self.rows):
            raise RuntimeError("warm_up is for a runner without answers under way")
        before, most = len(self._graphs), min(positions or self.length, self.length)
        self._sampler.prepare(range(len(starts)), [s.settings for s in starts], [s.key for s in starts])
        [self._numbered(start.selection) for start in starts]
        for rows in coming(starts, sorted({self._visible(n) for n in (*powers(most), most)})) if self._graph else ():
            self.rows[: len(rows)] = rows
            self._prepare(self._plan([row for row in rows if row is not None]))
            self.rows[: len(rows)] = [None] * len(rows)
        for slot in range(len(starts)):
            self._empty(slot)
        return len(self._graphs) - before

    # --- the step -----------------------------------------------------------------------------------------------------

    @_on_device
    @torch.inference_mode()
    def step(self, rows: Sequence[RunnerRow] | None = None) -> None:
        """Feed live rows (by default all) their columns and write the next; each must have room (`RunnerRow.position <
        length`). Rows coupled by text assist go together."""
        chosen = [row for row in self.rows if row is not None] if rows is None else rows
        if not chosen:
            return
        plan = self._plan(chosen)
        if plan.resting:
            stepped = {row.slot for row in chosen}
            rest = torch.tensor([slot not in stepped for slot in plan.slots])
            self._resting[self._index(plan.slots)] = to_device(rest, self._resting.device)
        self._view(plan).clean(plan.visible or None)
        if self._graph:
            self._prepare(plan)
            self._graphs.replay(plan)
        else:
            self._forward(plan)
        self._record(plan, chosen)

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
                self._hosts.setdefault(record.host.shape[1], []).append(record.host)
            known = record.host[: len(record.rows)]
            wide = known.shape[1] > k + a + 7
            odds = known[:, k + a + 7 :].to(torch.int32).view(torch.float32).tolist() if wide else [()] * len(known)
            for row, values, own in zip(record.rows, known.tolist(), odds, strict=True):
                if row is None or row.done or not row.live:
                    continue
                has_frame, text, has_text, done, needs_text, needs_audio, broken = values[k + a : k + a + 7]
                row.done, row.needs_text, row.needs_audio = bool(done), bool(needs_text), bool(needs_audio)
                frame = values[k : k + a] if has_frame else None
                written = text if has_text else None, row.done, bool(broken), tuple(own) if row.logprobs else None
                out.append((row, StepOutput(tuple(values[:k]), frame, *written)))
        return out

    def _plan(self, chosen: Sequence[RunnerRow], slots: tuple[int, ...] = ()) -> _Plan:
        """The plan that steps the chosen rows, in these slots where they are given."""
        resting = False
        if not slots:
            slots = tuple(sorted(row.slot for row in chosen))
            span = range(0 if self._cuda else slots[0], self._width(slots[-1] + 1))
            if self._cuda or 2 * len(slots) > len(span):  # gathering half of the rows takes longer than stepping them all
                resting = self._graph or sum(self.rows[slot] is not None for slot in span) > len(slots)
                slots = tuple(span)
        coupled = any(row.partner is not None and row.needs_text for row in chosen)
        every = tuple(range(len(slots)))
        text = every if any(row.needs_text for row in chosen) else ()
        audio = every if any(row.needs_audio for row in chosen) else ()
        if coupled and not self._graph:  # else all: fewer different plans, and a product of more rows costs no more
            writers = {row.slot if row.partner is None else row.partner for row in chosen if row.needs_text}
            speakers = {row.slot for row in chosen if row.needs_audio}
            text = tuple(i for i, slot in enumerate(slots) if slot in writers)
            audio = tuple(i for i, slot in enumerate(slots) if slot in speakers)
        audio_mode, text_mode = self._sampler.modes(slots)
        visible = self._visible(max(row.position for row in chosen) + 1)
        mode = Mode()
        used = {row.selection for row in chosen}
        mixed = len(used) > 1
        selection = tuple(self._selection) if mixed else tuple(one for one in used if one is not None)
        modes = audio_mode if audio else mode, text_mode if text else mode
        edits = active_edits(self.model)
        odds = any(row.logprobs for row in chosen)
        return _Plan(slots, text, audio, coupled, resting, *modes, visible, selection, mixed, edits, odds)

    def _index(self, slots: tuple[int, ...]) -> slice | Tensor:
        """Index of some slots: a slice where they are neighbours."""
        first, count = slots[0], len(slots)
        if slots == tuple(range(first, first + count)):
            return slice(first, first + count)
        return to_device(torch.tensor(slots), self._position.device)

    def _width(self, rows: int) -> int:
        """Number of rows that a step feeds; where each number costs a graph, a power of two or all."""
        return min(1 << (rows - 1).bit_length(), len(self.rows)) if self._graph else rows

    def _visible(self, positions: int) -> int:
        """Number of slots that a step reads, rounded up to few different numbers (fewer still where each costs a graph)."""
        if self.cache.ring:
            return 0
        if self._graph:
            return min(max(256, 1 << (positions - 1).bit_length()), self.length)
        return min(-(-positions // 64) * 64, self.length)

    def _forward(self, plan: _Plan) -> None:
        rows, view = self._index(plan.slots), self._view(plan)
        view.limit(plan.visible or None)
        position = self._position[rows]
        if plan.resting:
            position = torch.where(self._resting[rows], -1, position)
        decode = self.model if plan.selection or plan.everywhere else self._decode  # the compiled decoder knows neither
        with using(self._selection_of(plan, rows)):
            hidden = decode(self._column[rows][:, :, None], input_pos=position[:, None], cache=view)
        self._write(plan, hidden)

    def _view(self, plan: _Plan) -> KVCache:
        """View of the cache with the rows of a step."""
        view = self._views.get(plan.slots)
        if view is None:
            view = self.cache.select(plan.slots)
            if plan.slots[-1] - plan.slots[0] < len(plan.slots):  # of gathered rows there are too many kinds
                self._views[plan.slots] = view
        return view

    def _selection_of(self, plan: _Plan, rows: slice | Tensor) -> Selection | None:
        """Selection of adapters and edits for some slots."""
        if not plan.selection:
            return None
        return Selection(plan.selection, self._number[rows] if plan.mixed else None)

    def _write(self, plan: _Plan, hidden: Hidden) -> None:
        """Sample the rows' next columns from hidden states [B, 1, W], in place."""
        rows, slots = self._index(plan.slots), plan.slots
        cursor, decoder, a = self._cursor.select(rows), self.model.decoder, self.layout.n_audio
        sampled = self._pad.repeat(len(slots), 1)
        broken = torch.zeros_like(cursor.done)
        odds = torch.zeros(sampled.shape, device=sampled.device) if plan.logprobs else None
        if plan.audio:
            own, here = self._index(tuple(slots[i] for i in plan.audio)), self._index(plan.audio)
            with using(self._selection_of(plan, own)):
                logits = decoder.audio_logits(Hidden(hidden.text[here], hidden.audio[here]))[:, -1]
            sampled[here, :a] = self._sampler.audio(logits, own, cursor.step[here], plan.audio_mode)
            if odds is not None:
                odds[here, :a] = log_probabilities(self._sampler.audio_choices(logits), sampled[here, :a])
            broken[here] |= cursor.needs_audio[here] & broken_rows(hidden.audio[here], logits)
        if plan.text:
            own, here = self._index(tuple(slots[i] for i in plan.text)), self._index(plan.text)
            with using(self._selection_of(plan, own)):
                logits = decoder.text_logits(Hidden(hidden.text[here], hidden.audio[here]))[:, -1]
            text = self._sampler.text(logits, own, cursor.step[here], plan.text_mode)
            odd = broken_rows(hidden.text[here], logits)
            own_odds = log_probabilities(self._sampler.text_choices(logits), text[:, None])[:, 0] if plan.logprobs else None
            if plan.coupled:
                written = torch.arange(own.start, own.stop, device=text.device) if isinstance(own, slice) else own
                writer = torch.searchsorted(written, self._partner[rows]).clamp_max(len(text) - 1)
                text, odd = text[writer], odd[writer]
                own_odds = None if own_odds is None else own_odds[writer]
            sampled[:, a] = text
            if odds is not None and own_odds is not None:
                odds[:, a] = own_odds
            broken |= cursor.needs_text & odd
        after, push = cursor.push(sampled)
        position = self._position[rows]
        values = {name: getattr(after, name) for name in ("step", "text_ended", "audio_end", "history", "done")}
        column, position = push.column, torch.where(after.done, -1, position + 1)
        if plan.resting:
            rest = self._resting[rows]
            values = {name: _where(rest, getattr(cursor, name), value) for name, value in values.items()}
            column = _where(rest, self._column[rows], column)
            position = torch.where(rest, self._position[rows], position)
        for name, value in values.items():
            getattr(self._cursor, name)[rows] = value
        self._column[rows], self._position[rows] = column, position
        if plan.audio_mode.penalty or plan.text_mode.penalty:
            self._sampler.remember(column, rows)
        flags = (push.has_frame, push.text, push.has_text, push.done, after.needs_text, after.needs_audio, broken)
        parts = [push.column, push.frame, *(f[:, None] for f in flags)]
        if odds is None:
            self._packed[rows] = torch.cat(parts, dim=1)
        else:
            self._wide[rows] = torch.cat([*parts, odds.view(torch.int32).long()], dim=1)

    def _record(self, plan: _Plan, chosen: Sequence[RunnerRow]) -> None:
        """Copy the results of a step to the host, in its only copy."""
        stepped = set(chosen)
        rows = [row if (row := self.rows[slot]) in stepped else None for slot in plan.slots]
        whole = self._wide if plan.logprobs else self._packed
        packed = whole[self._index(plan.slots)]
        for row in chosen:
            row.position += 1
        if self._cuda:
            free = self._hosts.get(whole.shape[1])
            host = free.pop() if free else torch.empty(whole.shape, dtype=torch.long).pin_memory()
            host[: len(rows)].copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host, event = packed.clone(), None
        self._pending.append(_Record(rows, host, event))

    def _prepare(self, plan: _Plan) -> None:
        """Capture a step, unless it is captured already and the model's adapters are those that it was captured with.

        Rehearsals have every row done, so that they write to the spare slot only.
        """
        if self._changes != changes(self.model):
            self._graphs.keep(lambda plan: False)
            self._changes = changes(self.model)
        if plan in self._graphs:
            return
        state = [*self._state(), self._packed, self._wide]
        if self._sampler.seen is not None:
            state.append(self._sampler.seen)

        def idle() -> None:
            self._position.fill_(-1)
            self._cursor.done.fill_(True)

        self._graphs.capture(plan, lambda: self._forward(plan), state, idle)


def _where(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """`yes` in the rows [B] that are true, else `no`; both [B, ...]."""
    return torch.where(rows.view(-1, *[1] * (yes.ndim - 1)), yes, no)
