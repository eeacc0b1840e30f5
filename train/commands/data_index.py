"""`omni-train data index FOLDER`: write the index of a folder's Parquet files."""

from __future__ import annotations

from collections.abc import Sequence

from train.console.options import Parser, add_progress, given_path
from train.console.progress import counted
from train.data.rows.index import INDEX
from train.data.rows.indexing import write_index


def main(argv: Sequence[str]) -> int:
    """Runs the command; prints what is indexed."""
    parser = Parser(
        prog="omni-train data index",
        description=f"Write {INDEX} into a folder of rows, in place of the one there: a run then opens any number of files at "
        "once, and reads a row without the list of all others in its file. `data prepare` and `data filter` write it too. It "
        "holds the names, sizes and times of the files, and is refused when these change: index them again then.",
    )
    parser.add_argument("folder", type=given_path, help="folder of Parquet files of rows")
    add_progress(parser)
    chosen = parser.read(argv)
    index = write_index(chosen["folder"], chosen["progress"])
    print(f"{counted(index.rows, 'row')} of {counted(index.files, 'file')} indexed in {chosen['folder'] / INDEX}")
    return 0
