"""Describes rows on several machines: a part collects statistics of its rows, and `join_stats` those of all parts.

counts.json           rows and seconds, by field too; what could not be measured
samples.npz           values [n] of each measure, and how often each code occurs, [codes] of each stream
question.json, ...    words and texts of a side, see `TextCounts.save`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from omni.config import to_dict
from omni.errors import UserError
from omni.files import read_json, write_json, writing
from omni.tasks import Task
from train.console.progress import Kind
from train.data.inspect.collect import Collected, Group
from train.data.inspect.parts import DAMAGED, fingerprint, making, settings_of_parts
from train.data.inspect.scan import Scan
from train.data.inspect.stats import collect
from train.data.inspect.target import Target
from train.data.prepare.codecs import Codecs
from train.data.prepare.config import DataPart

COUNTS, SAMPLES = "counts.json", "samples.npz"


def collect_part(
    data: Path,
    codecs: Codecs,
    target: Target | None,
    tasks: tuple[Task, ...],
    out: Path,
    part: DataPart,
    words: Sequence[object],
    progress: Kind = "off",
) -> int:
    """Collect statistics of a part of the rows, in a folder beside the report's `out`; returns their number.

    Args:
        words: the command, without `--shard`.

    Raises:
        UserError: as of `parts.making`.
    """
    scan = Scan(data, progress)
    mine = scan.part(part.number, part.count)
    settings = {
        "context": 0 if target is None else target.config.decoder.context,
        "tasks": [task.name for task in tasks],
        "model": None if target is None else to_dict(target.config),
    }
    with making(out, part, settings_of_parts(words, data, [scan], settings)) as work:
        if work is not None:
            _save(collect(mine, codecs, target, tasks, progress), work)
    return mine.count


def _save(found: Collected, work: Path) -> None:
    facts = {name: (one.count, one.total, one.least, one.most) for name, one in found.samples.items()}
    write_json(
        work / COUNTS,
        {
            "all": asdict(found.all),
            "groups": {name: {value: asdict(one) for value, one in groups.items()} for name, groups in found.groups.items()},
            "samples": facts,
            "codes": {codec: len(counts) for codec, counts in found.codes.items()},
            "noted": found.noted,
            "damaged": found.damaged,
        },
    )
    arrays = {f"values {name}": one.values for name, one in found.samples.items()}
    arrays |= {f"codes {codec} {i}": one for codec, counts in found.codes.items() for i, one in enumerate(counts)}
    with writing(work / SAMPLES):
        np.savez(work / SAMPLES, allow_pickle=False, **arrays)
    for side, texts in found.texts.items():
        texts.save(work, side)


def join_stats(parts: Sequence[Path], settings: Mapping[str, Any]) -> Collected:
    """The statistics of all parts together; UserError where the rows have changed since, or a part is damaged."""
    scan = Scan(Path(settings["source"]))
    if [fingerprint(scan)] != settings["source_files"]:
        raise UserError(
            f"{scan.path} has changed since its parts were counted: it was {settings['source_files'][0]} and is "
            f"{fingerprint(scan)}; remove {parts[0].parent} and count again"
        )
    done = Collected()
    for place in parts:
        try:
            _add(done, place)
        except (OSError, EOFError, LookupError, ValueError, TypeError, BadZipFile) as error:
            raise UserError(f"{place} is damaged ({error}): {DAMAGED}") from error
    return done


def _add(done: Collected, place: Path) -> None:
    found = read_json(place / COUNTS, DAMAGED)
    done.all.add(Group(**found["all"]))
    for name, groups in found["groups"].items():
        for value, one in groups.items():
            done.add_group(name, value, Group(**one))
    done.noted.update(found["noted"])
    done.damaged += found["damaged"]
    with np.load(place / SAMPLES, allow_pickle=False) as arrays:
        for name, facts in found["samples"].items():
            done.sample(name).join(arrays[f"values {name}"], *facts)
        for codec, streams in found["codes"].items():
            done.add_codes(codec, [arrays[f"codes {codec} {i}"] for i in range(streams)])
    for side, texts in done.texts.items():
        texts.join(place, side)
