"""Draws batches and examples as text, to debug layouts."""

from __future__ import annotations

from omni.layout import IGNORE, Layout
from omni.tasks import TASKS, Columns
from omni.text import Tokenizer
from train.data.batching.batch import Batch


def describe(batch: Batch, layout: Layout, tokenizer: Tokenizer, row: int = 0, columns: int = 24) -> str:
    """Draw the examples of a packed row as text, each with its task and columns (at most `columns` of them at either end).

    A star marks a cell whose token is a target (predicted from the column before it), `~` a column with an encoder feature.
    """
    segments, out = batch.segments[row].cpu(), []
    used = int((batch.task[row] >= 0).sum())
    tasks = tuple(TASKS)
    for number in segments[:used].unique().tolist():
        place = (segments == number).nonzero().squeeze(1)
        start, end = int(place[0]), int(place[-1]) + 1
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
    out = []
    for first, last in _windows(len(example), columns):
        window = slice(first, last)
        if first:
            out.append(f"its last time steps, {first} to {last - 1}:")
        out.append(
            layout.draw(
                example.tokens[:, window],
                trained[:, window],
                lambda i: tokenizer.decode([i]),
                feature_index=example.feature_index[window],
            )
        )
    return out


def _windows(length: int, columns: int) -> list[tuple[int, int]]:
    """Column ranges to draw: all of a short example; of a long one, its start and its end."""
    return [(0, length)] if length <= 2 * columns else [(0, columns), (length - columns, length)]
