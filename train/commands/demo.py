"""`omni-train demo`: read the command line, with errors before anything heavy is imported, and run the demonstration."""

from __future__ import annotations

from collections.abc import Sequence

from omni.errors import UserError
from omni.process import importing
from train.config.parse import read_run

HELP = """usage: omni-train demo [CONFIG.yaml] [--any.key value ...]

Train the small model of the recipe nano for ten minutes on two CPU cores, examine it in voices that it has never heard, and
talk to it. The model, a question, its answer, pictures and report.md are in runs/nano afterwards. Keys of the configuration are
overridden as for `fit` (`omni-train fit --help` lists them).

  --budget.minutes M    train for M minutes instead of ten"""


def main(argv: Sequence[str]) -> int:
    """Runs the command; arguments are those of `fit`, with the recipe `nano` as the default."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(HELP)
        return 0
    words = list(argv)
    config = read_run(words if words and not words[0].startswith("-") else ["nano", *words])
    digits = next((s for s in config.data.sources if s.kind == "spoken-digits"), None)
    if digits is None:
        raise UserError("the demonstration asks about spoken digits, but no source of the configuration is of that kind")
    with importing():
        from train.commands.examine import demonstrate

    return demonstrate(config, digits)
