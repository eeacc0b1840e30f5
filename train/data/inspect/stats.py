"""Statistics of stored rows: counts and lengths, by source, language, speaker and task."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.tasks import Task
from omni.utils.remote import spelled
from train.console.progress import Display, Progress
from train.data.executor import HERE, Processes
from train.data.inspect.measures import Codecs
from train.data.inspect.scan import Scan, Target, over

if TYPE_CHECKING:
    from train.data.inspect.collect import Collected

STATS = "stats.json"
SHOWN = 12
"""Largest number of a field's values that a table shows."""


COLUMNS = {"mean": "mean", "min": "min", "p5": "5 %", "p50": "50 %", "p95": "95 %", "max": "max"}
"""Columns of the table of lengths: keys of `collect.summary`, and their titles."""

TEXT_COLUMNS = {"texts": "texts", "distinct_texts": "distinct", "words": "words", "distinct_words": "distinct words"}
"""Columns of the table of texts: keys of `TextCounts.plain`, and their titles."""


def collect(
    scan: Scan,
    codecs: Codecs,
    target: Target | None = None,
    tasks: tuple[Task, ...] = (),
    progress: Progress = "off",
    processes: Processes = HERE,
) -> Collected:
    """Collect statistics of all rows that can be read; the others are counted as noted."""
    from train.data.inspect.collect import Collected

    done = Collected()
    with closing(Display(len(scan), mode=progress)) as display:
        for part in over(scan, partial(row_counts, scan, codecs, target, tasks), processes, display):
            done.merge(part)
    return done


def row_counts(scan: Scan, codecs: Codecs, target: Target | None, tasks: tuple[Task, ...]) -> Callable[[range], Collected]:
    """Begin a process that collects statistics."""
    from train.data.inspect.collect import Collector

    def count(rows: range) -> Collected:
        collector = Collector(codecs, target, tasks)
        for item in scan.part(rows):
            if item.plain is None:
                collector.done.noted["rows that cannot be read"] += item.count
                collector.done.noted["files or row groups that are damaged"] += 1
                collector.done.damaged.append(f"{item.where}: {item.why}")
            elif item.row is None:
                collector.done.noted["rows that break the format"] += 1
            else:
                collector.add(item.row)
        return collector.done

    return count


def plain(collected: Collected, data: Path) -> dict[str, Any]:
    """Convert the statistics to plain data, for a report."""
    from train.data.inspect.collect import codebook_use, summary

    return {
        "data": spelled(data),
        **vars(collected.all),
        "noted": dict(sorted(collected.noted.items())),
        "by": {
            name: {value: vars(group) for value, group in sorted(groups.items())} for name, groups in collected.groups.items()
        },
        "texts": {side: counts.plain() for side, counts in collected.texts.items()},
        "lengths": {name: summary(values) for name, values in sorted(collected.samples.items())},
        "codes": {codec: [codebook_use(counts) for counts in streams] for codec, streams in collected.codes.items()},
    }
