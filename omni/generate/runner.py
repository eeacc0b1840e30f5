"""Feeds prompts into the rows of a cache, and steps the rows together, one column each.

Prefill writes prompts piece by piece and returns only the hidden state of each one's last column. Prompts of different lengths
are right-aligned in one batch, filled up at the front with columns at position -1, which write nothing; so every row's last
column is the batch's last. A fork serves two rows whose prompts differ in the last column only: one sequence of T + 1 columns
instead of two of T.

One step feeds every row's column, passes the hidden state to the heads, samples, and asks the layout's cursor
for the column that is fed next. All results of a step are packed into one tensor and copied to the host once; on a
GPU that copy is read one step late, so that the device always has work. A row that is done writes nothing
(position -1) from then on, without waiting for the host to notice.

Rows are slots of the cache: `begin` starts answers in any slots, `leave` empties a slot, and a step advances all rows or some
of them. Few rows among many are gathered; many are stepped in place, with the others between them resting: these are fed at
position -1 and keep their state. On CUDA a step is captured as a graph for each shape it takes (`StepPlan`); the tensors a
graph reads and writes belong to the runner and keep their addresses. What has changed since (other adapters active, weights
freed) a graph does not see, so that the runner drops them when the model changes. The eager path runs the same code.

Dimensions: B rows, K streams, A audio streams, T columns, N features, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omni.generate.rows import RowState, RunnerRow, Start, StepOutput, StepPlan, StepRecords
from omni.generate.sampling import Mode
from omni.layout import Layout
from omni.lora.attach import RowSelection, active_of, adapted, names_in, using
from omni.model.decoder import Hidden
from omni.model.kv_cache import KVCache
from omni.model.speech_model import SpeechModel
from omni.tasks import Columns
from omni.utils.hardware import capture_lock, to_device


class Prompt(NamedTuple):
    """Prompts of several rows as they are fed, on the host (features excepted).

    Attributes:
        tokens: [B, K, T].
        input_pos: positions of the columns in their rows, [B, T]; -1 is padding.
        features: encoder features of all clips, [N, W], None where no question is spoken.
        feature_index: which feature a column takes, [B, T], -1 for none.
    """

    tokens: Tensor
    input_pos: Tensor
    features: Tensor | None
    feature_index: Tensor


def pack(layout: Layout, prompts: Sequence[Columns], features: Sequence[Tensor], starts: Sequence[int] | None = None) -> Prompt:
    """Right-align prompts in one batch.

    Args:
        prompts: one per row; their feature indices count over the row's own clips.
        features: [n, W] of all clips of all rows, in order.
        starts: number of columns of each row that the cache holds already; only the rest is fed.
    """
    starts = starts or [0] * len(prompts)
    time = max(len(p) - s for p, s in zip(prompts, starts, strict=True))
    tokens = layout.ids("pad")[:, None].repeat(len(prompts), 1, time)
    position = torch.full((len(prompts), time), -1)
    index = torch.full((len(prompts), time), -1)
    offset = 0
    for i, (p, start) in enumerate(zip(prompts, starts, strict=True)):
        n = len(p) - start
        tokens[i, :, time - n :] = p.tokens[:, start:]
        position[i, time - n :] = torch.arange(start, len(p))
        own = p.feature_index[start:]
        index[i, time - n :] = torch.where(own >= 0, own + offset, -1)
        offset += sum(p.features)
    return Prompt(tokens, position, torch.cat(list(features)) if features else None, index)


class Fork(NamedTuple):
    """A second row, whose prompt differs from the first one's in its last column [K]."""

    row: int
    column: Tensor


class Prefill:
    """Writes prompts into rows of a cache.

    Args:
        rows: one for each prompt.
        fork: a second row for a batch of one; it gets a copy of the first row's columns.
    """

    def __init__(
        self, model: SpeechModel, cache: KVCache, rows: Sequence[int], prompt: Prompt, fork: Fork | None = None
    ) -> None:
        self.model, self.cache, self.rows, self.prompt, self.fork = model, cache, rows, prompt, fork
        self.fed, self.time = 0, prompt.tokens.shape[2]
        self._sent: list[Tensor] = []

    @property
    def left(self) -> int:
        """Number of columns that are still to be fed."""
        return self.time - self.fed

    @torch.inference_mode()
    def piece(self, columns: int) -> Hidden | None:
        """Feed up to that many columns (with a fork one more at the end); returns the last hidden states [B, 1, W] with the
        last piece, of the two rows where there is a fork."""
        if self.fork is None:
            hidden = self._feed(min(columns, self.left))
        elif self.left > columns:
            self._feed(columns)
            return None
        else:
            return self._split(self.fork)
        return Hidden(hidden.text[:, -1:], hidden.audio[:, -1:]) if not self.left else None

    def _feed(self, columns: int) -> Hidden:
        if not self._sent:
            self._sent = _sent(self.model.device, self.prompt.tokens, self.prompt.input_pos, self.prompt.feature_index)
        piece, (tokens, positions, index) = slice(self.fed, self.fed + columns), self._sent
        view = self.cache.select(self.rows).limit(max(int(self.prompt.input_pos[:, piece].max()) + 1, 1))
        self.fed += columns
        features = self.prompt.features
        return self.model(tokens[:, :, piece], features, index[:, piece], input_pos=positions[:, piece], cache=view)

    def _split(self, fork: Fork) -> Hidden:
        """Feed the rest; the other row's last column is one more of the first row, then moved to its own row. Where the cache
        is too short for that column, or its window slides, the two last columns are fed as a batch of two instead."""
        (row,), cache = self.rows, self.cache
        tokens, positions, features, index = self.prompt
        length = int(positions[0, -1]) + 1
        pair = torch.stack([tokens[0, :, -1], fork.column])  # [2, K]
        if cache.window is not None or length + 1 > cache.length:
            if self.left > 1:
                self._feed(self.left - 1)
            cache.copy_row(row, fork.row, length - 1)
            last = Prompt(pair[:, :, None], torch.full((2, 1), length - 1), None, torch.full((2, 1), -1))
            self.fed += 1
            return prefill(self.model, cache, (row, fork.row), last)
        rest = slice(self.fed, self.time - 1)
        slots = torch.cat([positions[:, self.fed :], torch.full((1, 1), length)], dim=1)
        tokens = torch.cat([tokens[:, :, rest], pair.T[None]], dim=2)
        index = torch.cat([index[:, rest], torch.full((1, 2), -1)], dim=1)
        tokens, slots, index, rotary = _sent(self.model.device, tokens, slots, index, slots.clamp_max(length - 1))
        view = _ForkCache(cache.select((row,)).limit(length + 1))
        hidden = self.model(tokens, features, index, positions=rotary, input_pos=slots, cache=view)
        self.fed = self.time
        cache.rewind(row, length)
        cache.copy_row(row, fork.row, length)
        for memory in (*cache.keys, *cache.values):
            memory[fork.row, length - 1] = memory[row, length]
        return Hidden(hidden.text[:, -2:].transpose(0, 1), hidden.audio[:, -2:].transpose(0, 1))


def _sent(device: torch.device, tokens: Tensor, *by_time: Tensor) -> list[Tensor]:
    """Copies tokens [B, K, T] and tensors [B, T] to the device, in one copy."""
    whole = to_device(torch.cat([tokens, *(each[:, None] for each in by_time)], dim=1), device)
    k = tokens.shape[1]
    return [whole[:, :k], *(whole[:, k + i] for i in range(len(by_time)))]


class _ForkCache:
    """A cache in which the newest position does not see the one before it: both follow the same past."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.update = cache, cache.update

    def begin_forward(self, input_pos: Tensor) -> Tensor:
        mask = self.cache.begin_forward(input_pos)
        mask[:, :, -1, mask.shape[3] - 2] = False
        return mask


def prefill(
    model: SpeechModel, cache: KVCache, rows: Sequence[int], prompt: Prompt, chunk: int = 512, fork: Fork | None = None
) -> Hidden:
    """Write prompts into rows of the cache, `chunk` columns at a time; returns the last hidden state [B, 1, W]."""
    filling = Prefill(model, cache, rows, prompt, fork)
    while (hidden := filling.piece(chunk)) is None:
        pass
    return hidden


# --- steps ------------------------------------------------------------------------------------------------------------

REHEARSALS = 3
"""Runs before a capture, in which libraries make their workspaces and choose their kernels."""


class Graphs(dict[Any, torch.cuda.CUDAGraph]):
    """The captured steps of one runner, by what determines their shape.

    All share one pool of memory, so they are replayed one after another, on one stream. Rehearsals and captures have a
    stream of their own, of the device that is current: PyTorch's default one belongs to the device that captured first.
    """

    _pool: Any = None
    _stream: Any = None

    def keep(self, wanted: Callable[[Any], bool]) -> None:
        """Drop the graphs whose keys are not wanted. With the last one its pool goes: PyTorch cannot capture into a pool that
        no graph uses any more, but in which a workspace lives on."""
        for key in [key for key in self if not wanted(key)]:
            del self[key]
        if not self:
            self._pool = None

    def capture(self, key: Any, work: Callable[[], None], state: Sequence[Tensor], idle: Callable[[], None]) -> None:
        """Capture `work`, which must do nothing but launch kernels.

        Args:
            state: tensors that it writes; they have their values again afterwards, also where it fails.
            idle: called before the rehearsals; sets `state` so that they write nowhere else.
        """
        device = state[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        graph = torch.cuda.CUDAGraph()
        with capture_lock(device):  # who synchronizes the device meanwhile would break the capture
            saved = [tensor.clone() for tensor in state]
            try:
                idle()
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    for _ in range(REHEARSALS):
                        work()
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    work()
            finally:
                torch.cuda.current_stream().wait_stream(self._stream)
                for tensor, value in zip(state, saved, strict=True):
                    tensor.copy_(value)
        self[key], self._pool = graph, pool


def powers(most: int) -> list[int]:
    """The powers of two up to a number."""
    return [1 << i for i in range(most.bit_length())]


def coming(starts: Sequence[Start], visible: Sequence[int]) -> Iterator[list[RunnerRow | None]]:
    """The rows of every step that answers will take, where a step is of a power of two rows, or of all.

    Args:
        starts: of the answers, from slot 0 on.
        visible: numbers of positions that steps read (0: all).
    """
    together = any(start.partner is not None for start in starts)
    counts = [len(starts)] if together else sorted({*powers(len(starts)), len(starts)})
    for count, seen, text, audio in product(counts, visible, (True, False), (True, False)):
        rows = [
            RunnerRow(slot, start, max(seen, 1) - 1, start.text and text, start.audio and audio)
            for slot, start in enumerate(starts[:count])
        ]
        stepped = [row if row.needs_text or row.needs_audio else None for row in rows]
        while stepped and stepped[-1] is None:
            stepped.pop()
        if stepped:
            yield stepped


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
        self, model: SpeechModel, rows: int, length: int, *, chunk: int = 512, graph: bool | None = None, compile: bool = False
    ) -> None:
        self.model, self.layout = model, model.layout
        self._cuda = model.device.type == "cuda"
        # CUDA's current device: to it belong streams, events, graphs and pinned memory, wherever the tensors are; -1 is none
        self._gpu = model.device if self._cuda else -1
        self._graph = self._cuda if graph is None else graph and self._cuda
        self._decode: Any = torch.compile(model) if compile else model
        self._chunk = chunk
        self._selection: list[RowSelection] = []
        self._changes = active_of(model).changes
        self._records = StepRecords(self.layout)
        self.rows: list[RunnerRow | None] = []
        self._allocate(rows, length)

    def _allocate(self, rows: int, length: int) -> None:
        """Make the cache and the state of all rows, which are empty."""
        model = self.model
        self.length = min(length, model.config.decoder.context)
        self.chunk = min(self._chunk, model.config.decoder.context)
        self.cache = model.make_cache(rows, self.length, chunk=self.chunk)
        self.rows += [None] * (rows - len(self.rows))
        self.state = RowState(self.layout, rows, model.device)
        self._views: dict[tuple[int, ...], KVCache] = {}
        self._graphs = Graphs()

    # --- rows come and go ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, slots: Sequence[int], hidden: Hidden, starts: Sequence[Start]) -> list[RunnerRow]:
        """Start answers in empty slots and write their first columns.

        Args:
            hidden: hidden state of each prompt's last column, [B, 1, W].
            starts: one per slot.
        """
        rows, selections = [], []
        for slot, start in zip(slots, starts, strict=True):
            rows.append(RunnerRow(slot, start, start.position, start.text, start.audio))
            selections.append(self._numbered(start.selection))
            self.rows[slot] = rows[-1]
        with torch.cuda.device(self._gpu):
            self.state.begin(slots, starts, selections)
            plan = self._plan(rows, tuple(slots))
            self.state.write(plan, hidden, self.model.decoder)
            self._record(plan, rows)
        return rows

    def _numbered(self, selection: RowSelection) -> int:
        if selection is None:
            return 0
        if not any(self.rows) and selection not in self._selection:  # adapters and edits that the model no longer has go
            names = {None, *(name for part in adapted(self.model).values() for name in (*part.pairs, *part.attached))}
            self._selection = [each for each in self._selection if names.issuperset(names_in(each))]
            self._graphs.keep(lambda plan: names.issuperset([*plan.everywhere, *chain(*map(names_in, plan.selection))]))
        if selection not in self._selection:
            used = {row.start.selection for row in self.rows if row is not None}
            free = next((i for i, other in enumerate(self._selection) if other not in used), len(self._selection))
            self._selection[free : free + 1] = [selection]
        return self._selection.index(selection) + 1

    def leave(self, row: RunnerRow) -> None:
        """Free the row's slot; the content of the cache stays."""
        if row.live:
            row.live = False
            self.rows[row.slot] = None
            self.state.idle(row.slot)

    @torch.no_grad()
    def grow(self, rows: int, length: int) -> None:
        """Make room for that many rows and positions, where there is less; results must have been read before. Captured graphs
        are dropped."""
        cache, state, count = self.cache, self.state, len(self.rows)
        self._allocate(max(rows, count), max(length, self.length))
        self.state.take(state)
        self.cache.take(cache, count)

    @torch.inference_mode()
    def warm_up(self, starts: Sequence[Start]) -> int:
        """Capture the steps of answers like these before anybody waits for one, and return how many: of every width up to
        theirs, with both heads and with each alone. One takes 0.1 to 0.3 s (estimated). Nothing where steps are not
        captured. `starts`: from slot 0 on; their positions do not count."""
        if any(self.rows):
            raise RuntimeError("warm_up is for a runner without answers under way")
        before, most = len(self._graphs), self.length
        self.state.sampler.prepare(range(len(starts)), [s.settings for s in starts], [s.key for s in starts])
        for start in starts:
            self._numbered(start.selection)
        with torch.cuda.device(self._gpu):
            for rows in coming(starts, sorted({self._visible(n) for n in (*powers(most), most)})) if self._graph else ():
                self.rows[: len(rows)] = rows
                self._prepare(self._plan([row for row in rows if row is not None]))
                self.rows[: len(rows)] = [None] * len(rows)
        for slot in range(len(starts)):
            self.state.idle(slot)
        return len(self._graphs) - before

    # --- the step -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, rows: Sequence[RunnerRow] | None = None) -> None:
        """Feed live rows (by default all) their columns and write the next; each must have room (`RunnerRow.position <
        length`). Rows coupled by text assist go together."""
        chosen = [row for row in self.rows if row is not None] if rows is None else rows
        if not chosen:
            return
        with torch.cuda.device(self._gpu):
            plan = self._plan(chosen)
            if plan.resting:
                self.state.rest(plan.slots, {row.slot for row in chosen})
            self._view(plan).clean(plan.visible or None)
            if self._graph:
                self._prepare(plan)
                self._graphs[plan].replay()
            else:
                self._forward(plan)
            self._record(plan, chosen)

    def results(self, flush: bool = False) -> list[tuple[RunnerRow, StepOutput]]:
        """Outputs of the steps since the last call; on a GPU without the newest step, unless `flush` waits for it."""
        with torch.cuda.device(self._gpu):
            return self._records.read(1 if self._cuda and not flush else 0)

    def _plan(self, chosen: Sequence[RunnerRow], slots: tuple[int, ...] = ()) -> StepPlan:
        """The plan that steps the chosen rows, in these slots where they are given."""
        resting = False
        if not slots:
            slots = tuple(sorted(row.slot for row in chosen))
            rows = slots[-1] + 1
            if self._graph:  # where each number of rows costs a graph
                rows = min(1 << (rows - 1).bit_length(), len(self.rows))
            span = range(0 if self._cuda else slots[0], rows)
            if self._cuda or 2 * len(slots) > len(span):  # gathering half of the rows takes longer than stepping them all
                resting = self._graph or sum(self.rows[slot] is not None for slot in span) > len(slots)
                slots = tuple(span)
        coupled = any(row.start.partner is not None and row.needs_text for row in chosen)
        every = tuple(range(len(slots)))
        text = every if any(row.needs_text for row in chosen) else ()
        audio = every if any(row.needs_audio for row in chosen) else ()
        if coupled and not self._graph:  # else all: fewer different plans, and a product of more rows costs no more
            partners = {row.slot: row.start.partner for row in chosen if row.needs_text}
            writers = {slot if partner is None else partner for slot, partner in partners.items()}
            speakers = {row.slot for row in chosen if row.needs_audio}
            text = tuple(i for i, slot in enumerate(slots) if slot in writers)
            audio = tuple(i for i, slot in enumerate(slots) if slot in speakers)
        audio_mode, text_mode = self.state.sampler.modes(slots)
        visible = self._visible(max(row.position for row in chosen) + 1)
        mode = Mode()
        used = {row.start.selection for row in chosen}
        mixed = len(used) > 1
        selection = tuple(self._selection) if mixed else tuple(each for each in used if each is not None)
        modes = audio_mode if audio else mode, text_mode if text else mode
        edits = active_of(self.model).edits
        logprobs = any(row.start.logprobs for row in chosen)
        return StepPlan(slots, text, audio, coupled, resting, *modes, visible, selection, mixed, edits, logprobs)

    def _visible(self, positions: int) -> int:
        """Number of slots that a step reads, rounded up to few different numbers (fewer still where each costs a graph)."""
        if self.cache.ring:
            return 0
        if self._graph:
            return min(max(256, 1 << (positions - 1).bit_length()), self.length)
        return min(-(-positions // 64) * 64, self.length)

    def _forward(self, plan: StepPlan) -> None:
        state, view = self.state, self._view(plan)
        view.limit(plan.visible or None)
        column, position = state.fed(plan)
        decode = self.model if plan.selection or plan.everywhere else self._decode  # the compiled decoder knows neither
        with using(state.selection(plan, state.index(plan.slots))):
            hidden = decode(column, input_pos=position, cache=view)
        state.write(plan, hidden, self.model.decoder)

    def _view(self, plan: StepPlan) -> KVCache:
        """View of the cache with the rows of a step."""
        view = self._views.get(plan.slots)
        if view is None:
            view = self.cache.select(plan.slots)
            if plan.slots[-1] - plan.slots[0] < len(plan.slots):  # of gathered rows there are too many kinds
                self._views[plan.slots] = view
        return view

    def _record(self, plan: StepPlan, chosen: Sequence[RunnerRow]) -> None:
        """Copy the results of a step to the host, in its only copy."""
        stepped = set(chosen)
        rows = [row if (row := self.rows[slot]) in stepped else None for slot in plan.slots]
        whole = self.state.wide if plan.logprobs else self.state.packed
        packed = whole[self.state.index(plan.slots)]
        for row in chosen:
            row.position += 1
        self._records.add(rows, packed, len(whole), self._cuda)

    def _prepare(self, plan: StepPlan) -> None:
        """Capture a step, unless it is captured already and the model's adapters are those that it was captured with.

        Rehearsals have every row done, so that they write to the spare slot only.
        """
        if self._changes != active_of(self.model).changes:
            self._graphs.keep(lambda plan: False)
            self._changes = active_of(self.model).changes
        if plan in self._graphs:
            return
        self._graphs.capture(plan, lambda: self._forward(plan), self.state.written(), self.state.idle)
