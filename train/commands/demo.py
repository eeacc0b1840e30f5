"""`python -m train demo`: the words of the command line, refused before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omni.errors import UserError
from omni.process import importing
from train.config.parse import read_run

CONFIG = Path(__file__).parent.parent.parent / "configs" / "nano.yaml"


def main(argv: Sequence[str]) -> int:
    """The command; arguments are those of `fit`, with `configs/nano.yaml` as the default file."""
    words = list(argv)
    config = read_run(words if words and not words[0].startswith("-") else [str(CONFIG), *words])
    digits = next((s for s in config.data.sources if s.kind == "spoken-digits"), None)
    if digits is None:
        raise UserError("the demonstration asks about spoken digits, but no source of the configuration is of that kind")
    with importing():
        from train.commands.examine import demonstrate

    return demonstrate(config, digits)
