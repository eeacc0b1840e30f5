"""The packed micro-batch that a packer makes and the objective reads, and its drawing as text.

Dimensions: R rows, K streams, T columns, N clips, M values of a feature frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from omni.layout import IGNORE, Layout
from omni.model.attention import PackedRows
from omni.tasks import TASKS, Columns
from omni.text import Tokenizer
from train.data.batching.examples import Example

T = TypeVar("T")


class computed_once(Generic[T]):
    """A property that the host computes once for a batch. Not a `cached_property`: Fabric copies what a module is given, and a
    dataclass without those. Computing one again from a batch that is on a GPU would wait for it."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self.find, self.__doc__ = find, find.__doc__

    def __get__(self, batch: Batch | None, owner: type) -> T:
        if batch is None:
            return self  # type: ignore[return-value]
        known, name = vars(batch.known), self.find.__name__
        if name not in known:
            known[name] = self.find(batch)
        value: T = known[name]
        return value


@dataclass
class Batch:
    """A packed micro-batch: rows of whole examples, and the clips that are their spoken questions.

    Attributes:
        tokens: [R, K, T] ids local to each stream; pad in columns without example.
        targets: [R, K, T]; `targets[..., t]` is to be predicted from column t, `IGNORE` where nothing is trained.
        feature_index: [R, T] index of each column's encoder feature, counted over all clips of the batch, -1 for none.
        segments: [R, T] number of the example within its row; the unused end has a number of its own.
        task: [R, T] index into `tuple(TASKS)`, -1 in columns without example.
        inputs: [N, M, t] features of the clips as the encoder takes them, zero beyond their ends; or, where `encoded`, the
            frames that it made of them, [N, D, t].
        input_lengths, frames: feature frames and encoder frames of each clip.
        transcripts: ids for the alignment loss of each clip, empty where there are none.
        names: `each`: row (`Example.where`) and tasks of each segment, in the rows one after another, empty for an unused end.
            No tuple itself, because Fabric looks through the elements of any container for tensors.
        turn: labels of the turn head for the frames of all clips, [sum of frames, 2] int8, see `Clip.turn`; None for none.
        state: plain data: of the packer after this batch; see `train.data.batching.loader`.
        known: what the host has found of the batch; kept by a copy with the same fields, not by `replace`.
    """

    tokens: Tensor
    targets: Tensor
    feature_index: Tensor
    segments: Tensor
    task: Tensor
    inputs: Tensor
    input_lengths: list[int]
    frames: list[int]
    transcripts: list[list[int]]
    examples: int
    positions: int
    state: dict[str, Any]
    names: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(each=()))
    turn: Tensor | None = None
    encoded: bool = False
    known: SimpleNamespace = field(default_factory=SimpleNamespace, init=False, repr=False, compare=False)

    TENSORS = ("tokens", "targets", "feature_index", "segments", "task", "inputs")

    @property
    def padding(self) -> float:
        """Share of the columns without example."""
        return 1 - self.positions / self.segments.numel()

    @computed_once
    def supervised(self) -> list[Tensor]:
        """Flat positions [n] in [R * T] with a target, for each stream."""
        return [(self.targets[:, k].reshape(-1) != IGNORE).nonzero().squeeze(1) for k in range(self.targets.shape[1])]

    @computed_once
    def places(self) -> list[tuple[Tensor, Tensor]]:
        """The same positions, with the task of each, for each stream (on the CPU)."""
        task = self.task.reshape(-1)
        return [(at, task[at]) for at in self.supervised]

    @computed_once
    def turn_labels(self) -> int:
        """Number of labels of the turn head."""
        return 0 if self.turn is None else int((self.turn >= 0).sum())

    @computed_once
    def packed(self) -> PackedRows:
        """Bounds of the segments. The longest is rounded up to a power of two: compiled blocks see few values of it."""
        starts, lengths = self._segments
        longest = int(lengths.amax()) if len(lengths) else 1
        ends = torch.cat([starts, starts.new_tensor([self.segments.numel()])])
        return PackedRows(ends.int(), max(128, 1 << (longest - 1).bit_length()))

    @computed_once
    def lengths(self) -> Tensor:
        """Columns of each example, [examples] (on the CPU)."""
        starts, lengths = self._segments
        return lengths[self.task.flatten()[starts] >= 0]

    @computed_once
    def _segments(self) -> tuple[Tensor, Tensor]:
        """First column of every segment, in the rows one after another, and its columns."""
        first = torch.ones_like(self.segments, dtype=torch.bool)
        first[:, 1:] = self.segments[:, 1:] != self.segments[:, :-1]
        starts = first.flatten().nonzero().squeeze(1)
        return starts, torch.diff(starts, append=starts.new_tensor([first.numel()]))

    def to(self, device: torch.device | str) -> Batch:
        """Move the tensors to `device`."""
        return self.moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy the batch to page-locked memory, from which copies to a GPU do not block (the loader calls this)."""
        return self.moved(lambda tensor: tensor.pin_memory())

    def moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with its tensors moved. What the host needs (`supervised` to `lengths`) is found before."""
        known: dict[str, Any] = {
            "supervised": [move(index) for index in self.supervised],
            "packed": self.packed._replace(ends=move(self.packed.ends)),
            "places": self.places,
            "lengths": self.lengths,
            "turn_labels": self.turn_labels,
        }
        tensors: dict[str, Any] = {name: move(getattr(self, name)) for name in self.TENSORS}
        if self.turn is not None:
            tensors["turn"] = move(self.turn)
        moved = replace(self, **tensors)
        moved.known = SimpleNamespace(**known)
        return moved


def assemble(
    rows: Sequence[Sequence[Example]], length: int, layout: Layout, bands: int, state: dict[str, Any], encoded: bool = False
) -> Batch:
    """Assemble rows of examples into one micro-batch, each row padded to `length` columns. `bands`: values of a clip's inputs,
    which are the encoder's frames where `encoded`."""
    shape = (len(rows), len(layout), length)
    tokens = layout.ids("pad")[None, :, None].repeat(shape[0], 1, length)
    targets = torch.full(shape, IGNORE)
    feature_index = torch.full((shape[0], length), -1)
    segments = torch.zeros(shape[0], length, dtype=torch.long)
    task = torch.full((shape[0], length), -1)
    features, names = 0, list[tuple[str, str]]()
    for r, row in enumerate(rows):
        start = 0
        for number, example in enumerate(row):
            columns, end = example.columns, start + len(example.columns)
            tokens[r, :, start:end] = columns.tokens
            targets[r, :, start:end] = columns.targets
            index = columns.feature_index
            feature_index[r, start:end] = torch.where(index >= 0, index + features, index)
            segments[r, start:end] = number
            task[r, start:end] = example.task
            features += sum(columns.features)
            start = end
        segments[r, start:] = len(row)
        names += [(example.where, "+".join(example.tasks)) for example in row] + [("", "")] * (start < length)
    examples = [example for row in rows for example in row]
    clips = [clip for example in examples for clip in example.clips]
    labels = [torch.full((clip.frames, 2), -1, dtype=torch.int8) if clip.turn is None else clip.turn for clip in clips]
    lengths = [clip.inputs.shape[1] for clip in clips]
    inputs = torch.zeros(len(clips), bands, max(lengths, default=0))
    for padded, clip in zip(inputs, clips, strict=True):
        padded[:, : clip.inputs.shape[1]] = clip.inputs
    return Batch(
        tokens=tokens,
        targets=targets,
        feature_index=feature_index,
        segments=segments,
        task=task,
        inputs=inputs,
        input_lengths=lengths,
        frames=[clip.frames for clip in clips],
        transcripts=[list(clip.transcript) for clip in clips],
        examples=len(examples),
        positions=sum(len(example.columns) for example in examples),
        state=state,
        names=SimpleNamespace(each=tuple(names)),
        turn=torch.cat(labels) if any(clip.turn is not None for clip in clips) else None,
        encoded=encoded,
    )


def describe(batch: Batch, layout: Layout, tokenizer: Tokenizer, row: int = 0, columns: int = 24) -> str:
    """Draw the examples of a packed row as text, each with its task and columns (at most `columns` of them at either end). A
    star marks a cell whose token is a target (predicted from the column before it), `~` a column with an encoder feature."""
    segments, out = batch.segments[row].cpu(), []
    used = int((batch.task[row] >= 0).sum())
    tasks = tuple(TASKS)
    for number in segments[:used].unique().tolist():
        positions = (segments == number).nonzero().squeeze(1)
        start, end = int(positions[0]), int(positions[-1]) + 1
        tokens, targets = (t[row, :, start:end].cpu() for t in (batch.tokens, batch.targets))
        index = batch.feature_index[row, start:end].cpu()
        names = dict.fromkeys(tasks[i] for i in batch.task[row, start:end].tolist())
        clip = int((index >= 0).sum())
        out.append(f"example {number}: {'+'.join(names)}, time steps {start} to {end - 1}, {clip} of them with features")
        out += draw_columns(Columns(tokens, targets, index), layout, tokenizer, columns)
    out.append(f"{batch.examples} examples, {len(batch.frames)} clips, {100 * batch.padding:.1f} % padding")
    return "\n".join(out)


def draw_columns(example: Columns, layout: Layout, tokenizer: Tokenizer, columns: int = 24) -> list[str]:
    """Draw an example's prompt and targets: whole, or at most `columns` columns at either end."""
    trained = example.targets.roll(1, dims=1) != IGNORE  # each column's target is the next column's token
    trained[:, 0] = False
    out, length = [], len(example)
    for first, last in [(0, length)] if length <= 2 * columns else [(0, columns), (length - columns, length)]:
        window = slice(first, last)
        if first:
            out.append(f"its last time steps, {first} to {last - 1}:")
        tokens, index = example.tokens[:, window], example.feature_index[window]
        out.append(layout.draw(tokens, trained[:, window], lambda i: tokenizer.decode([i]), feature_index=index))
    return out
