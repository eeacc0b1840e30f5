"""`omni-train data join OUT`: make the output of the parts of `data prepare`, `filter`, `validate` or `stats` (`--shard`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from omni.process import importing
from train.commands import data_filter, data_stats, data_validate
from train.console.options import Parser, add_progress, given_path
from train.data.inspect.filter_parts import join_filter
from train.data.inspect.validate_parts import bounds_of, join_validation, scans_of
from train.data.prepare.join import find_parts, join
from train.data.prepare.parts import COMMAND, parts_folder, parts_in, settings_in
from train.data.prepare.report import summary
from train.data.prepare.settings import NAME


def main(argv: Sequence[str]) -> int:
    """Runs the command; prints what is in the output."""
    parser = Parser(
        prog="omni-train data join",
        description="Make OUT of the parts that `omni-train data prepare SOURCE OUT --shard i/n` has made, on any number of "
        "machines: the same files as without --shard. All parts must be whole; what is missing is named, with the command that "
        "makes it. The parts stay where they are, as links to the same files where the disk can have these. Parts of "
        "`data filter`, `data validate --report OUT` and `data stats --out OUT` are joined in the same way.",
    )
    parser.add_argument("out", type=given_path, help="folder to make, or report, as it was given to the command of the parts")
    parser.add_argument("folders", type=given_path, nargs="*", help="the parts, from anywhere; default: those in OUT.parts")
    add_progress(parser)
    chosen = parser.read(argv)
    out, folders, progress = chosen["out"], chosen["folders"], chosen["progress"]
    command = _command(out, folders)
    if command == "prepare":
        print(summary(join(out, folders, progress), out))
        return 0
    found, settings = find_parts(out.resolve(), folders)
    parts = [place for _, place in found]
    if command == "stats":
        with importing():
            from train.data.inspect.stats_parts import join_stats

        return data_stats.tell(join_stats(parts, settings), Path(settings["source"]), out, settings["context"])
    if command == "filter":
        data_filter.show(join_filter(out, parts, settings, progress), out)
        return 0
    data, against = scans_of(settings)
    given = {"report": out, "findings": settings["findings"] and Path(settings["findings"]), "examples": settings["examples"]}
    return data_validate.tell(
        partial(join_validation, parts, settings), {**given, "data": data, "against": against}, bounds_of(settings)
    )


def _command(out: Path, folders: Sequence[Path]) -> str:
    """What has made the parts: `prepare`, `filter`, `validate` or `stats`."""
    places = list(folders) or [place for _, place in parts_in(parts_folder(out.resolve())) if (place / NAME).is_file()]
    settings = settings_in(places[0]) if places else {}
    return str(settings[COMMAND][1]) if COMMAND in settings else "prepare"
