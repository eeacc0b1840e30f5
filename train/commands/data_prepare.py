"""`omni-train data prepare SOURCE OUT`: convert a data set into rows to train on."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jsonargparse

from omni.errors import UserError
from train.console.command import check_given_config
from train.console.options import given_path
from train.console.progress import duration
from train.data.prepare.config import PrepareConfig
from train.data.prepare.prepare import prepare
from train.data.prepare.report import summary
from train.data.readers import READERS


def main(argv: Sequence[str]) -> int:
    """Runs the command; prints what was made, and how long it took."""
    check_given_config(argv)
    chosen = _parser().parse_args(list(argv))
    values = vars(_parser().instantiate(chosen))
    source, out, progress = (values.pop(name) for name in ("source", "out", "progress"))
    values.pop("config", None)
    start = time.monotonic()
    done = prepare(source, out, PrepareConfig(**values), progress)
    print(summary(done, Path(out)))
    if progress != "off":
        print(f"took {duration(time.monotonic() - start)}", file=sys.stderr)
    return 0


def _parser() -> jsonargparse.ArgumentParser:
    formats = "\n".join(f"  {name:<18} {reader.summary}" for name, reader in READERS.items())
    parser = _Parser(
        prog="omni-train data prepare",
        description="Read a data set, speak and encode what is missing, and store the rows as Parquet files in a folder,\n"
        "which appears when it is whole. The same command goes on with what was interrupted.\n\nformats:\n" + formats,
        formatter_class=_Help,
        exit_on_error=False,
        default_env=False,
    )
    parser.add_argument("source", type=given_path, help="file or folder of the data set")
    parser.add_argument("out", type=given_path, help="folder to make")
    parser.add_argument("--config", action="config", help="YAML file with any of the following")
    parser.add_class_arguments(PrepareConfig, None)
    parser.add_argument("--progress", type=Literal["auto", "bar", "lines", "off"], default="auto", help="what is shown")
    return parser


class _Help(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Leaves the list of formats as it is."""


class _Parser(jsonargparse.ArgumentParser):
    """A parser whose errors are one line each (UserError)."""

    def error(self, message: str, ex: BaseException | None = None) -> None:  # type: ignore[override]
        text = " ".join(str(message).split())
        raise UserError(f"data prepare: {text}; see omni-train data prepare --help") from ex
