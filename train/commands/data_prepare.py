"""`omni-train data prepare SOURCE OUT`: convert a data set into rows to train on."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from train.config.parse import ConfigParser
from train.console.options import Listing, add_progress, given_path
from train.console.progress import duration
from train.data.prepare.config import PrepareConfig
from train.data.prepare.prepare import prepare
from train.data.prepare.shards import summary
from train.data.readers import READERS


def main(argv: Sequence[str]) -> int:
    """Runs the command; prints what was made, and how long it took."""
    parser = _parser()
    chosen = parser.read(argv)
    config = parser.configuration(chosen)
    start = time.monotonic()
    done = prepare(chosen["source"], chosen["out"], config, chosen["progress"])
    print(summary(done, chosen["out"]))
    if chosen["progress"] != "off":
        print(f"took {duration(time.monotonic() - start)}", file=sys.stderr)
    return 0


def _parser() -> ConfigParser:
    formats = "\n".join(f"  {name:<18} {reader.summary}" for name, reader in READERS.items())
    parser = ConfigParser(
        prog="omni-train data prepare",
        description="Read a data set, speak and encode what is missing, and store the rows as Parquet files in a folder,\n"
        "which appears when it is whole. The same command goes on with what was interrupted.\n"
        "With --shard i/n it makes one of n parts, each in a folder of its own.\n\nformats:\n" + formats,
        formatter_class=Listing,
    )
    parser.add_argument("source", type=given_path, help="file or folder of the data set")
    parser.add_argument("out", type=given_path, help="folder to make")
    parser.add_config(PrepareConfig)
    add_progress(parser)
    return parser
