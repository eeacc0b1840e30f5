"""Validates rows on several machines: a part checks its rows, and `join_validation` compares those of all parts.

found.jsonl          findings in single rows: {"of", "kind", "where", "text", "count"}
digests/0-audio      digests of all rows, see `Digests.save`; 1-audio, ... of the other splits
counts.json          rows that were read, and microseconds of sound
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from omni.errors import UserError
from omni.files import read_json, write_json, writing
from omni.remote import spelled
from train.console.progress import Kind
from train.data.inspect.checks import Bounds
from train.data.inspect.digests import saved
from train.data.inspect.display import display_of
from train.data.inspect.findings import Findings
from train.data.inspect.parts import DAMAGED, fingerprint, making, settings_of_parts
from train.data.inspect.validate import (
    Seen,
    Summary,
    check_sums,
    find_duplicates,
    find_leaks,
    look_at,
    look_at_other,
    open_scans,
)
from train.data.prepare.codecs import Codecs
from train.data.prepare.config import DataPart

FOUND, COUNTS, DIGESTS = "found.jsonl", "counts.json", "digests"
_KINDS = ("audio", "texts", "said", "whole", "speakers")


class _Noted(Findings):
    """Writes findings for the join; `split` says where they are: 0 for the rows, 1 for the first other split, ..."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(examples=0)
        self.file, self.split = file, -1

    def add(self, kind: str, where: str, text: str, count: int = 1) -> None:
        line = {"of": self.split, "kind": kind, "where": where, "text": text, "count": count}
        self.file.write(json.dumps(line, ensure_ascii=False) + "\n")


def validate_part(
    data: Path,
    against: Sequence[Path],
    bounds: Bounds,
    codecs: Codecs,
    out: Path,
    part: DataPart,
    words: Sequence[object],
    options: Mapping[str, Any],
    progress: Kind = "off",
) -> int:
    """Check the rows of a part, and look at its share of the others, in a folder beside the report `out`; returns their number.

    Args:
        words: the command, without `--shard`.
        options: what it prints and writes, for `join_validation`.

    Raises:
        UserError: as of `validate`, and of `parts.making`.
    """
    scan, others = open_scans(data, against, progress)
    settings = {"against": [spelled(other) for other in against], "bounds": asdict(bounds), **options}
    mine, *theirs = (one.part(part.number, part.count) for one in (scan, *others))
    with making(out, part, settings_of_parts(words, data, [scan, *others], settings)) as work:
        if work is not None:
            (work / DIGESTS).mkdir()
            display = display_of(progress, mine, *theirs)
            try:
                with writing(work / FOUND), open(work / FOUND, "w", encoding="utf-8", errors="surrogatepass") as file:
                    noted = _Noted(file)
                    check_sums(mine, noted)
                    noted.split = 0
                    seen = look_at(mine, bounds, codecs, noted, display)
                    _save(seen, work, 0)
                    for noted.split, other in enumerate(theirs, 1):
                        _save(look_at_other(other, noted, display), work, noted.split)
            finally:
                display.close()
            write_json(work / COUNTS, {"rows": seen.rows, "microseconds": seen.microseconds})
    return mine.count


def _save(seen: Seen, work: Path, of: int) -> None:
    for kind in _KINDS:
        digests = getattr(seen, kind)
        (digests.digests if kind == "speakers" else digests).save(work / DIGESTS / f"{of}-{kind}")


def join_validation(parts: Sequence[Path], settings: Mapping[str, Any], findings: Findings) -> Summary:
    """Find what all parts together have found, and duplicates and leaks: what `validate` finds, in the same order.

    UserError where rows have changed since.
    """
    scan, others = open_scans(Path(settings["source"]), [Path(other) for other in settings["against"]])
    now = [fingerprint(one) for one in (scan, *others)]
    if now != settings["source_files"]:
        raise UserError(
            f"{scan.path}, or what it is compared with, has changed since its parts were validated: it was "
            f"{settings['source_files']} and is {now}; remove {parts[0].parent} and validate again"
        )
    _repeat(parts, -1, findings)
    _repeat(parts, 0, findings)
    seen = _loaded(parts, 0)
    for place in parts:
        counts = read_json(place / COUNTS, DAMAGED)
        seen.rows, seen.microseconds = seen.rows + counts["rows"], seen.microseconds + counts["microseconds"]
    find_duplicates(scan, seen, findings)
    for number, other in enumerate(others, 1):
        _repeat(parts, number, findings)
        find_leaks(scan, seen, other, _loaded(parts, number), findings)
    return Summary(seen.rows, len(scan), seen.microseconds / 3.6e9, findings, scan.report())


def _repeat(parts: Sequence[Path], of: int, findings: Findings) -> None:
    """Add the findings of the parts in a split."""
    for line in _lines(parts):
        if line.pop("of") == of:
            findings.add(**line)


def _lines(parts: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for place in parts:
        with open(place / FOUND, encoding="utf-8", errors="surrogatepass") as file:
            yield from map(json.loads, file)


def _loaded(parts: Sequence[Path], of: int) -> Seen:
    """Digests of all parts, in the order of their rows."""
    seen = Seen()
    for place in parts:
        for kind in _KINDS:
            file = place / DIGESTS / f"{of}-{kind}"
            if kind != "speakers":
                getattr(seen, kind).add_from(file)
                continue
            for value, row in saved(file):
                seen.speakers.add_digest(value, row)
    return seen


def bounds_of(settings: Mapping[str, Any]) -> Bounds:
    """The bounds that parts were validated with."""
    plain = dict(settings["bounds"])
    rates = plain.pop("chars_per_second")
    return Bounds(**plain, chars_per_second=None if rates is None else (rates[0], rates[1]))


def scans_of(settings: Mapping[str, Any]) -> tuple[Path, list[Path]]:
    """The rows that parts were validated of, and the others."""
    return Path(settings["source"]), [Path(other) for other in settings["against"]]
