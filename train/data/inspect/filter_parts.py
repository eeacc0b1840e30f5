"""Filters rows on several machines: a part judges its rows, and `join_filter` writes those that are kept.

What a row's own rules say does not depend on other rows. Duplicates do: a part stores digests of the rows that its rules keep,
and they are compared when all are joined, in the order of the rows, as one machine does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.config import from_dict
from omni.errors import UserError
from omni.files import writing
from train.console.progress import Kind
from train.data.inspect.display import display_of, watched
from train.data.inspect.filter import UNREADABLE, KeptDigests, RowDigests, RowFilter, RowLengths, RowVerdict, write_kept
from train.data.inspect.parts import fingerprint, making, settings_of_parts
from train.data.inspect.rules import Rules
from train.data.inspect.scan import FoundRow, Scan, UnreadableRows
from train.data.prepare.config import DataPart
from train.data.prepare.shards import AGAIN

if TYPE_CHECKING:
    import pyarrow as pa

VERDICTS = "verdicts.parquet"
_GROUP = 4096
_DUPLICATES = ("row", "question_audio", "text")


def judge_part(
    data: Path, out: Path, part: DataPart, judge: RowFilter, words: Sequence[object], shard_mb: int, progress: Kind = "off"
) -> int:
    """Judge the rows of a part, in a folder beside `out`; returns their number.

    Args:
        words: the command, without `--shard`.

    Raises:
        UserError: as of `parts.making`; an answer that cannot be decoded, no space left.
    """
    scan = Scan(data, progress)
    mine = scan.part(part.number, part.count)
    options = {"rules": json.loads(json.dumps(asdict(judge.rules))), "shard_mb": shard_mb}
    with making(out, part, settings_of_parts(words, data, [scan], options)) as work:
        if work is not None:
            _judge(mine, work / VERDICTS, judge, progress)
    return mine.count


def _judge(scan: Scan, file: Path, judge: RowFilter, progress: Kind) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    display, rows = display_of(progress, scan), list[dict[str, Any]]()
    try:
        with writing(file), pq.ParquetWriter(file, _schema(), write_page_checksum=True) as writer:
            for item in watched(scan, display):
                rows.append({"index": item.index, **_verdict(item, judge)})
                if len(rows) == _GROUP:
                    writer.write_table(pa.Table.from_pylist(rows, _schema()))
                    rows = []
            writer.write_table(pa.Table.from_pylist(rows, _schema()))
    finally:
        display.close()


def _verdict(item: FoundRow | UnreadableRows, judge: RowFilter) -> dict[str, Any]:
    if isinstance(item, UnreadableRows) or item.row is None:
        return {"reasons": json.dumps([(UNREADABLE, item.why)])}
    reasons, checked = judge.own_reasons(item.row)
    if reasons:
        return {"reasons": json.dumps(reasons)}
    heard = judge.heard(item.row)
    return {
        **judge.digests(checked),
        **RowLengths.of(checked)._asdict(),
        "heard": json.dumps(heard) if heard else None,
    }


def _schema() -> pa.Schema:
    import pyarrow as pa

    digests = [(name, pa.list_(pa.uint64())) for name in _DUPLICATES]
    lengths = [("turns", pa.int32()), ("question_seconds", pa.float64()), ("answer_seconds", pa.float64())]
    return pa.schema([("index", pa.int64()), ("reasons", pa.string()), *digests, *lengths, ("heard", pa.string())])


def join_filter(out: Path, parts: Sequence[Path], settings: Mapping[str, Any], progress: Kind = "off") -> dict[str, Any]:
    """Write the rows that are kept, by the parts' verdicts: the bytes that one machine writes; returns the report.

    Raises:
        UserError: as of `write_kept`; rows that have changed since they were judged.
    """
    scan = Scan(settings["source"], progress)
    if [fingerprint(scan)] != settings["source_files"]:
        raise UserError(
            f"{scan.path} has changed since its rows were judged: it was {settings['source_files'][0]} and is "
            f"{fingerprint(scan)}; remove {parts[0].parent} and judge them again"
        )
    rules = from_dict(Rules, settings["rules"], "rules")
    judge = _Verdicts(rules, parts)
    return write_kept(scan, out, judge, settings["rules"], settings["shard_mb"], progress)


class _Verdicts:
    """Decides by what the parts have stored."""

    def __init__(self, rules: Rules, parts: Sequence[Path]) -> None:
        self._rules, self._kept = rules, KeptDigests(rules)
        self._stored = _verdicts(parts)

    def __call__(self, item: FoundRow | UnreadableRows) -> RowVerdict:
        verdict = next(self._stored, None)
        if verdict is None or verdict["index"] != item.index:
            raise UserError(f"{item.where} is not what was judged: {AGAIN}")
        if verdict["reasons"]:
            return RowVerdict(_reasons(verdict["reasons"]))
        digests: RowDigests = {name: verdict[name] for name in self._rules.drop_duplicates}
        reasons = self._kept.reasons(digests, lambda: _reasons(verdict["heard"]))
        return RowVerdict(reasons, RowLengths(*(verdict[name] for name in RowLengths._fields)))


def _reasons(text: str | None) -> list[tuple[str, str]]:
    return [(name, why) for name, why in json.loads(text or "[]")]


def _verdicts(parts: Sequence[Path]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for place in parts:
        try:
            with pq.ParquetFile(place / VERDICTS, page_checksum_verification=True) as file:
                for batch in file.iter_batches(_GROUP):
                    yield from batch.to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{place / VERDICTS} is damaged ({error}): remove {place} and make it again") from error
