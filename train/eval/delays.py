"""Evaluates a model that listens at several lengths of its encoder's chunks, and sets figures beside the delay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omni.checkpoint.folder import read_config
from omni.errors import UserError
from omni.files import write_json, write_whole
from omni.utils.charts import drawn, markdown_table
from train.eval.config import EvalConfig, Progress
from train.eval.run import evaluate

if TYPE_CHECKING:
    from train.eval.measures import Figure

Figures = Mapping[str, "Figure"]

JSON, TABLE, PICTURE = "delays.json", "delays.md", "delays.png"


def evaluate_delays(
    model: Path, data: Path, out: Path, config: EvalConfig, chunks: Sequence[int], progress: Progress = "auto"
) -> dict[int, Figures]:
    """Evaluates once for each length of a chunk, into `out/chunk-320` and the like; figures by milliseconds, 0 for whole clips.

    Raises:
        UserError: as of `evaluate`; a length is given twice, or is none of the encoder's (before anything is asked).
    """
    if len(set(chunks)) < len(chunks):
        raise UserError(f"--chunks {','.join(map(str, chunks))} names a length twice; name each once")
    for chunk in chunks:
        read_config(model).encoder.with_chunk(chunk)
    found: dict[int, Figures] = {}
    for chunk in chunks:
        _, found[chunk] = evaluate(model, data, out / f"chunk-{chunk}", replace(config, chunk_ms=chunk), progress)
    write_delays(found, out)
    return found


def write_delays(found: Mapping[int, Figures], out: Path) -> None:
    """Writes the figures of several lengths as a table, as JSON and as a picture."""
    from train.eval.measures import plain

    head, rows = delay_table(found)
    write_whole(out / TABLE, markdown_table(head, rows) + "\n")
    write_json(out / JSON, {chunk: {name: plain(one) for name, one in figures.items()} for chunk, figures in found.items()})
    draw_delays(found, out / PICTURE)


def delay_table(found: Mapping[int, Figures]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: a row for each length, a column for each figure. Before the end of its chunk nobody hears a
    word: half of the chunk on the average."""
    from train.eval.measures import MEASURES, shown

    names = list(next(iter(found.values())))
    head = ["chunk", "mean wait", *(MEASURES[name].title for name in names)]
    rows = []
    for chunk, figures in found.items():
        waits = [f"{chunk} ms", f"{chunk / 2:g} ms"] if chunk else ["whole", "-"]
        rows.append([*waits, *(shown(name, figures[name].value) if name in figures else "-" for name in names)])
    return head, rows


def draw_delays(found: Mapping[int, Figures], file: Path) -> Path:
    """Draws the shares and error rates, or all figures where there are none, over the length of a chunk, with 95 % intervals;
    whole clips at the right."""
    from train.eval.measures import MEASURES
    from train.eval.pictures import SHARES, errors_of, lengths_of

    chunks = sorted(found, key=lambda chunk: chunk or float("inf"))
    names = [name for name in SHARES if all(name in found[chunk] for chunk in chunks)]
    scale, unit = (100.0, "per cent, with 95 % intervals") if names else (1.0, "with 95 % intervals")
    names = names or list(found[chunks[0]])
    with drawn(file) as axes:
        axis = axes[0, 0]
        for name in names:
            figures = [found[chunk][name] for chunk in chunks]
            lengths, errors = lengths_of(figures, scale), errors_of(figures, scale)
            axis.errorbar(range(len(chunks)), lengths, yerr=errors, marker="o", label=MEASURES[name].title)
        axis.set_xticks(range(len(chunks)), [f"{chunk} ms" if chunk else "whole" for chunk in chunks])
        axis.set(xlabel="chunk of the encoder", ylabel=unit)
        axis.set_ylim(bottom=0)
    return file
