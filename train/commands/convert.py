"""`omni-train convert SOURCE TARGET`: convert weights of other projects into a model folder, and out again."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from omni.convert.kinds import KINDS
from omni.utils.process import importing
from train.console.options import Parser, given_path
from train.console.progress import Bar, duration
from train.convert.options import ConvertOptions
from train.convert.target import check


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    source, target, options = parse(argv)
    check(source, target, options)
    with importing():
        from train.convert.convert import convert

    started = time.monotonic()
    with Bar(not options.quiet) as bar:
        what, files = convert(source, target, options, bar)
    size, seconds = sum(f.bytes for f in files.values()), time.monotonic() - started
    print(f"{target}: {what}")
    for name, stamp in sorted(files.items()):
        print(f"  {name:<28}{stamp.bytes:>16,} bytes   crc32 {stamp.crc32:08x}")
    nonfinite = [tensor for _, stamp in sorted(files.items()) for tensor in stamp.nonfinite]
    if nonfinite:
        which = nonfinite[0] if len(nonfinite) == 1 else f"{len(nonfinite)} tensors (the first is {nonfinite[0]})"
        print(f"warning: NaN or infinity in {which}: fetch {source} again, or ask who trained it", file=sys.stderr)
    print(f"{size / 1e9:.2f} GB in {duration(seconds)} ({size / 1e6 / max(seconds, 1e-3):.0f} MB/s)")
    return 0


def parse(argv: Sequence[str]) -> tuple[Path, Path, ConvertOptions]:
    """Parses source, target and options; UserError where they are not valid."""
    formats = ", ".join(f"{name} ({what})" for name, what in KINDS.items())
    parser = Parser(prog="omni-train convert", description=f"{__doc__} Kinds: {formats}.")
    parser.add_argument("source", type=given_path, help="a file or folder of weights")
    parser.add_argument("target", type=given_path, help="the folder to write")
    for flag, text in _FLAGS.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    parser.add_class_arguments(ConvertOptions, None, skip=set(_FLAGS))
    values = parser.read(argv)
    source, target = values.pop("source"), values.pop("target")
    return source, target, ConvertOptions(**values)


_FLAGS = {
    "overwrite": "replace a TARGET that an earlier conversion or training wrote",
    "keep_text": "keep a language model as text: the smallest audio parts (codec2, zeros, a nano encoder), untrained",
    "drop_vision": "of a mini-omni2: leave its vision adapter aside and keep what hears and speaks",
    "drop_ctc": "of a model folder: leave its alignment head aside, which only training uses",
    "quiet": "show nothing while it works",
}
