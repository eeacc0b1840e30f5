"""`omni-train data COMMAND ...`: prepare, validate, describe, listen to and filter data."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from train.console.command import check_command

SUBCOMMANDS = {
    "prepare": ("train.commands.data_prepare", "a data set as rows to train on: prepare SOURCE OUT [--codec NAME ...]"),
    "validate": ("train.commands.data_validate", "find what is wrong with rows: validate DATA"),
    "stats": ("train.commands.data_stats", "lengths, speakers, texts in tables and plots: stats DATA"),
    "listen": ("train.commands.data_listen", "one row as sound and text: listen DATA ROW"),
    "filter": ("train.commands.data_filter", "keep the rows that rules allow: filter DATA OUT --rules FILE"),
}
"""Name of a command to its module, whose `main(argv)` returns the exit code, and what it does."""

HELP = """usage: omni-train data COMMAND [options]

{commands}

`omni-train data COMMAND --help` explains a command."""


def main(argv: Sequence[str]) -> int:
    """Runs a command on data, whose module is imported only then; returns the exit code."""
    arguments = list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP.format(commands="\n".join(f"  {name:<9} {text}" for name, (_, text) in SUBCOMMANDS.items())))
        return 0 if arguments else 2
    name, *rest = arguments
    check_command(name, SUBCOMMANDS, "data")
    return importlib.import_module(SUBCOMMANDS[name][0]).main(rest)
