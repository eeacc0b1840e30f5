"""`omni-train data stats DATA`: describe stored rows in tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omni.errors import UserError
from omni.tasks import find_task
from omni.utils.charts import print_table
from omni.utils.process import importing
from train.console.options import Parser, add_progress, given_path
from train.console.progress import counted, duration
from train.data.inspect.display import add_processes, chosen_processes, make_folder, save_report
from train.data.inspect.scan import Scan
from train.data.inspect.stats import COLUMNS, SHOWN, STATS, TEXT_COLUMNS, collect, plain
from train.data.inspect.target import add_options, chosen_target
from train.data.prepare.codecs import Codecs

if TYPE_CHECKING:
    from train.data.inspect.collect import Collected, Group


def main(argv: Sequence[str]) -> int:
    """Runs the command; prints tables, and writes pictures and a report where a folder is given."""
    parser = Parser(
        prog="omni-train data stats",
        description="Count rows, turns, hours and lengths, by source, language, speaker and task, and how codes are used; for "
        "a model also tokens and the columns of its examples. Recordings are not decoded: their headers say how long they are.",
    )
    parser.add_argument("data", type=given_path, help="Parquet file or folder of rows")
    parser.add_argument("--out", type=given_path, help=f"write {STATS} and the pictures to this folder")
    add_options(parser)
    parser.add_argument("--tasks", type=str, nargs="+", default=["A1A2"], help="tasks whose columns are counted, for a model")
    parser.add_argument("--codec_folder", type=given_path, help="weights of the codec, where it is a special one")
    add_processes(parser)
    add_progress(parser)
    chosen = parser.read(argv)
    target, codecs = chosen_target(chosen), Codecs(chosen["codec_folder"])
    tasks = tuple(find_task(name, "--tasks") for name in chosen["tasks"]) if target is not None else ()
    scan, processes = Scan(chosen["data"], chosen["progress"]), chosen_processes(chosen)
    collected = collect(scan, codecs, target, tasks, chosen["progress"], processes)
    return tell(collected, chosen["data"], chosen["out"], target.config.decoder.context if target is not None else 0)


def tell(collected: Collected, data: Path, out: Path | None, context: int) -> int:
    """Print statistics, and write report and pictures to `out`, where there is one; UserError where no row could be read."""
    with importing():
        from train.data.inspect.pictures import draw_all

    if collected.damaged and not collected.all.rows:
        raise UserError(collected.damaged[0])
    show(collected)
    if out is not None:
        make_folder(out)
        save_report(out / STATS, plain(collected, data))
        print(f"wrote {', '.join(str(file) for file in [out / STATS, *draw_all(collected, out, context)])}")
    return 0


def show(collected: Collected) -> None:
    """Prints the tables on standard output."""
    whole = collected.all
    print(
        f"{counted(whole.rows, 'row')}, {counted(whole.turns, 'turn')}, {duration(whole.question_seconds)} of spoken "
        f"questions, {duration(whole.answer_seconds)} of spoken answers"
    )
    for name, count in sorted(collected.noted.items()):
        if count:
            print(f"{count} {name}")
    for one in collected.damaged[:SHOWN]:
        print(f"warning: {one}")
    for name, groups in collected.groups.items():
        if set(groups) - {""}:
            _show_groups(name, groups)
    _show_texts(collected)
    rows = []
    for name, sample in collected.samples.items():
        summary = sample.summary()
        rows.append([name, str(sample.count), *(f"{summary[column]:.4g}" for column in COLUMNS)])
    if rows:
        print_table("lengths; spaces are no characters", ("", "count", *COLUMNS.values()), rows)
    for codec in collected.codes:
        uses = collected.use(codec)
        cells = [
            [
                f"audio{i}",
                str(len(use.counts)),
                f"{100 * use.used:.1f}",
                f"{use.entropy:.2f}",
                f"{math.log2(max(1, len(use.counts))):.2f}",
                f"{100 * float(use.shares[0]) if len(use.shares) else 0:.1f}",
            ]
            for i, use in enumerate(uses)
        ]
        print_table(f"codes of {codec}", ("stream", "codes", "used %", "entropy, bits", "at most", "most frequent %"), cells)


def _show_texts(collected: Collected) -> None:
    rows = []
    for side, counts in collected.texts.items():
        plain = counts.plain()
        spoken = collected.samples.get(f"{side} seconds")
        mean = f"{spoken.mean:.2f}" if spoken else ""
        if counts.texts:
            rows.append([f"{side}s", *(str(plain[name]) for name in TEXT_COLUMNS), mean])
    if rows:
        print_table("texts and their words", ("", *TEXT_COLUMNS.values(), "mean seconds"), rows)


def _show_groups(name: str, groups: dict[str, Group]) -> None:
    order = sorted(groups, key=lambda value: (-groups[value].rows, value))
    rows = [
        [
            value or "(none)",
            str(groups[value].rows),
            str(groups[value].turns),
            duration(groups[value].question_seconds),
            duration(groups[value].answer_seconds),
        ]
        for value in order[:SHOWN]
    ]
    more = f" ({len(order)}, the {SHOWN} largest)" if len(order) > SHOWN else ""
    print_table(f"by {name}{more}", (name, "rows", "turns", "questions", "answers"), rows)
