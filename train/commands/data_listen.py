"""`omni-train data listen DATA ROW`: write one row as sound, and draw its columns as a model reads them."""

from __future__ import annotations

from collections.abc import Sequence

from omni.utils.process import importing
from train.console.options import Parser, check_least, given_path
from train.data.inspect.listen import draw, find_row, own_folder, sounds
from train.data.inspect.measures import Codecs
from train.data.inspect.options import add_options, chosen_target, own_codec
from train.data.inspect.scan import Scan


def main(argv: Sequence[str]) -> int:
    """Runs the command; writes WAV files and prints what the row holds."""
    parser = Parser(
        prog="omni-train data listen",
        description="Write a row's question and answer as WAV files, the answer also as its codes sound where the codec is at "
        "hand, and draw its prompt and targets as a model is shown them: `*` marks targets, `~` what is heard, `.` is pad.",
    )
    parser.add_argument("data", type=given_path, help="Parquet file or folder of rows")
    parser.add_argument("row", type=str, help="its number in the data, FILE:ROW with the number in that file, or its id")
    parser.add_argument(
        "--out", type=given_path, help="folder for the WAV files; listen-DATA-ROW in this one where none is named"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files of other sounds that are there")
    add_options(parser)
    parser.add_argument("--task", type=str, help="what it is drawn as; the row's own or the first that fits")
    parser.add_argument("--columns", type=int, default=24, help="time steps that are drawn at either end of a long example")
    parser.add_argument("--codec_folder", type=given_path, help="weights of the codec; by default those in the model's folder")
    chosen = parser.read(argv)
    check_least(chosen, columns=1)
    scan, codecs = Scan(chosen["data"]), Codecs(own_codec(chosen))
    target = chosen_target(chosen)
    with importing():
        from train.data.inspect.collect import FIELDS

    row = find_row(scan, chosen["row"])
    print(f"{row.where}: " + ", ".join(f"{name} {getattr(row, name)!r}" for name in ("id", *FIELDS)))
    out = chosen["out"] or own_folder(scan.path, chosen["row"])
    for line in sounds(row, out, codecs, chosen["overwrite"]):
        print(line)
    if target is not None:
        print(draw(row, target, codecs, chosen["task"], chosen["columns"]))
    return 0
