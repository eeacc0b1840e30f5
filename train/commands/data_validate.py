"""`omni-train data validate DATA`: find what is wrong with stored rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from omni.utils.charts import print_table
from omni.utils.remote import spelled
from train.console.options import Parser, add_progress, check_least, given_path
from train.console.progress import counted, duration
from train.data.inspect.checks import Bounds
from train.data.inspect.display import add_processes, chosen_processes, make_folder, save_report
from train.data.inspect.findings import KINDS, Findings
from train.data.inspect.validate import Summary, report, validate
from train.data.prepare.codecs import Codecs
from train.data.prepare.report import untaken


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 where an error was found, 0 where at most warnings were."""
    parser = Parser(
        prog="omni-train data validate",
        description="Find what is wrong with rows: format, codes, recordings, texts, duplicates, and what other data has too. "
        "Exit code 1 where there are errors; warnings do not count.",
    )
    parser.add_argument("data", type=given_path, help="Parquet file or folder of rows")
    parser.add_argument("--against", type=given_path, nargs="+", default=[], help="other splits, which must share nothing")
    parser.add_argument("--codec_folder", type=given_path, help="weights of the codec, where it is a special one")
    parser.add_argument("--report", type=given_path, help="write counts and examples to this JSON file")
    parser.add_argument("--findings", type=given_path, help="write every finding to this JSON lines file")
    parser.add_argument("--examples", type=int, default=3, help="how many of a kind are shown")
    parser.add_class_arguments(Bounds, None)
    add_processes(parser)
    add_progress(parser)
    chosen = parser.read(argv)
    bounds = Bounds(*(chosen[name] for name in Bounds.__dataclass_fields__))
    check_least(chosen, examples=0)
    codecs = Codecs(chosen["codec_folder"])
    processes = chosen_processes(chosen)
    with contextlib.ExitStack() as stack:
        stream: TextIO | None = None
        if chosen["findings"] is not None:
            make_folder(chosen["findings"].parent)
            stream = stack.enter_context(open(chosen["findings"], "w", encoding="utf-8"))
        findings = Findings(chosen["examples"], stream)
        summary = validate(chosen["data"], chosen["against"], bounds, codecs, findings, chosen["progress"], processes)
    show(summary, chosen["data"])
    if chosen["report"] is not None:
        save_report(chosen["report"], report(summary, chosen["data"], chosen["against"], bounds))
    return 1 if findings.of("error") else 0


def show(summary: Summary, data: Path) -> None:
    """Prints the findings on standard output."""
    findings = summary.findings
    print(f"{summary.rows} of {summary.total} rows of {spelled(data)} read, {duration(3600 * summary.hours)} of sound")
    if summary.prepared.get("items"):
        kept, broken = summary.prepared["rows"], summary.prepared["broken"]
        print(f"prepared of {counted(summary.prepared['items'], 'item')}: {counted(kept, 'row')}, {broken} made none")
        print(untaken(summary.prepared), end="\n" * bool(untaken(summary.prepared)))
    if not findings.counts:
        print("nothing found")
        return
    rows = [[name, KINDS[name].severity, str(findings.counts[name]), KINDS[name].what] for name in findings.kinds()]
    print_table("", ("finding", "severity", "count", "what it is"), rows)
    for name in findings.kinds():
        for where, text in findings.shown[name]:
            print(f"{KINDS[name].severity} {name}: {where}: {text}")
        rest = findings.counts[name] - len(findings.shown[name])
        if rest > 0 and findings.shown[name]:
            print(f"  and more of {name}")
    print(f"{counted(findings.of('error'), 'error')}, {counted(findings.of('warning'), 'warning')}")
