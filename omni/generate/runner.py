"""The step runner: advances the rows of one cache together, one column each.

One step feeds every row's column, passes the hidden state to the heads, samples, and asks the layout's cursor
for the column that is fed next. All results of a step are packed into one tensor and copied to the host once; on a
GPU that copy is read one step late, so that the device always has work. A row that is done writes nothing
(position -1) from then on, without waiting for the host to notice.

Rows are slots of the cache: `begin` starts answers in any slots, `leave` empties a slot, and a step advances all rows or some
of them. Few rows among many are gathered; many are stepped in place, with the others between them resting: these are fed at
position -1 and keep their state. On CUDA a step is captured as a graph for each shape it takes (`StepPlan`); the tensors a
graph reads and writes belong to the runner and keep their addresses. What has changed since (other adapters active, weights
freed) a graph does not see, so that the runner drops them when the model changes. The eager path runs the same code.

Dimensions: B rows, K streams, A audio streams, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import chain, product
from typing import Any, TypeVar

import torch
from torch import Tensor

from omni.generate.rows import RowState, RunnerRow, Start, StepOutput, StepPlan, StepRecords
from omni.generate.sampling import Mode
from omni.lora.attach import RowSelection, active_of, adapted, names_in, using
from omni.model.decoder import Hidden
from omni.model.kv_cache import KVCache
from omni.model.speech_model import SpeechModel
from omni.utils.hardware import capture_lock

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
            RunnerRow(slot, max(seen, 1) - 1, s.text and text, s.audio and audio, s.partner, s.selection, logprobs=s.logprobs)
            for slot, s in enumerate(starts[:count])
        ]
        stepped = [row if row.needs_text or row.needs_audio else None for row in rows]
        while stepped and stepped[-1] is None:
            stepped.pop()
        if stepped:
            yield stepped


F = TypeVar("F", bound=Callable[..., Any])


def _on_device(method: F) -> F:
    """Run a method with the runner's GPU as CUDA's current device, to which streams, events, graphs and pinned memory belong,
    wherever the tensors are."""

    @wraps(method)
    def here(self: Runner, *args: Any, **kwargs: Any) -> Any:
        if not self._cuda:
            return method(self, *args, **kwargs)
        with torch.cuda.device(self._device):
            return method(self, *args, **kwargs)

    return here  # type: ignore[return-value]


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
        self._changes = active_of(model).changes
        self._device = device
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
        self.state = RowState(self.layout, rows, self._device)
        self._views: dict[tuple[int, ...], KVCache] = {}
        self._graphs = Graphs()

    # --- rows come and go ---------------------------------------------------------------------------------------------

    @_on_device
    @torch.inference_mode()
    def begin(self, slots: Sequence[int], hidden: Hidden, starts: Sequence[Start]) -> list[RunnerRow]:
        """Start answers in empty slots and write their first columns.

        Args:
            hidden: hidden state of each prompt's last column, [B, 1, W].
            starts: one per slot.
        """
        rows, selections = [], []
        for n, s in zip(slots, starts, strict=True):
            rows.append(RunnerRow(n, s.position, s.text, s.audio, s.partner, s.selection, logprobs=s.logprobs))
            selections.append(self._numbered(s.selection))
            self.rows[n] = rows[-1]
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
            used = {row.selection for row in self.rows if row is not None}
            free = next((i for i, other in enumerate(self._selection) if other not in used), len(self._selection))
            self._selection[free : free + 1] = [selection]
        return self._selection.index(selection) + 1

    def leave(self, row: RunnerRow) -> None:
        """Free the row's slot; the content of the cache stays."""
        if row.live:
            row.live = False
            self.rows[row.slot] = None
            self.state.empty(row.slot)

    @torch.no_grad()
    def grow(self, rows: int, length: int) -> None:
        """Make room for that many rows and positions, where there is less; results must have been read before. Captured graphs
        are dropped."""
        cache, state, count = self.cache, self.state, len(self.rows)
        self._allocate(max(rows, count), max(length, self.length))
        self.state.take(state)
        self.cache.take(cache, count)

    @_on_device
    @torch.inference_mode()
    def warm_up(self, starts: Sequence[Start]) -> int:
        """Capture the steps of answers like these before anybody waits for one, and return how many: of every width up to
        theirs, with both heads and with each alone. One takes 0.1 to 0.3 s (estimated). Nothing where steps are not
        captured. `starts`: from slot 0 on; their positions do not count."""
        if any(self.rows):
            raise RuntimeError("warm_up is for a runner without answers under way")
        before, most = len(self._graphs), self.length
        self.state.sampler.prepare(range(len(starts)), [s.settings for s in starts], [s.key for s in starts])
        [self._numbered(start.selection) for start in starts]
        for rows in coming(starts, sorted({self._visible(n) for n in (*powers(most), most)})) if self._graph else ():
            self.rows[: len(rows)] = rows
            self._prepare(self._plan([row for row in rows if row is not None]))
            self.rows[: len(rows)] = [None] * len(rows)
        for slot in range(len(starts)):
            self.state.empty(slot)
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
            self.state.rest(plan.slots, {row.slot for row in chosen})
        self._view(plan).clean(plan.visible or None)
        if self._graph:
            self._prepare(plan)
            self._graphs[plan].replay()
        else:
            self._forward(plan)
        self._record(plan, chosen)

    @_on_device
    def results(self, flush: bool = False) -> list[tuple[RunnerRow, StepOutput]]:
        """Outputs of the steps since the last call; on a GPU without the newest step, unless `flush` waits for it."""
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
        coupled = any(row.partner is not None and row.needs_text for row in chosen)
        every = tuple(range(len(slots)))
        text = every if any(row.needs_text for row in chosen) else ()
        audio = every if any(row.needs_audio for row in chosen) else ()
        if coupled and not self._graph:  # else all: fewer different plans, and a product of more rows costs no more
            writers = {row.slot if row.partner is None else row.partner for row in chosen if row.needs_text}
            speakers = {row.slot for row in chosen if row.needs_audio}
            text = tuple(i for i, slot in enumerate(slots) if slot in writers)
            audio = tuple(i for i, slot in enumerate(slots) if slot in speakers)
        audio_mode, text_mode = self.state.sampler.modes(slots)
        visible = self._visible(max(row.position for row in chosen) + 1)
        mode = Mode()
        used = {row.selection for row in chosen}
        mixed = len(used) > 1
        selection = tuple(self._selection) if mixed else tuple(each for each in used if each is not None)
        modes = audio_mode if audio else mode, text_mode if text else mode
        edits = active_of(self.model).edits
        logprobs = any(row.logprobs for row in chosen)
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
