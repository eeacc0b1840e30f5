"""`omni-train data join OUT`: make the output of the parts that `data prepare --shard` has made."""

from __future__ import annotations

from collections.abc import Sequence

from train.console.options import Parser, add_progress, given_path
from train.data.prepare.join import join
from train.data.prepare.report import summary


def main(argv: Sequence[str]) -> int:
    """Runs the command; prints what is in the output."""
    parser = Parser(
        prog="omni-train data join",
        description="Make OUT of the parts that `omni-train data prepare SOURCE OUT --shard i/n` has made, on any number of "
        "machines: the same files as without --shard. All parts must be whole; what is missing is named, with the command that "
        "makes it. The parts stay where they are, as links to the same files where the disk can have these.",
    )
    parser.add_argument("out", type=given_path, help="folder to make, as it was given to `data prepare`")
    parser.add_argument("folders", type=given_path, nargs="*", help="the parts, from anywhere; default: those in OUT.parts")
    add_progress(parser)
    chosen = parser.read(argv)
    print(summary(join(chosen["out"], chosen["folders"], chosen["progress"]), chosen["out"]))
    return 0
