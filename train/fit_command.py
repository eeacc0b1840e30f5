"""`python -m train fit`: the words of the command line, refused before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence

from omni.process import importing
from train.parse import read_run


def main(argv: Sequence[str]) -> int:
    """The command: a YAML file and dotted overrides. Returns the exit code: 0, or 128 + the signal that stopped the run."""
    dry = "--dry_run" in argv
    config = read_run([arg for arg in argv if arg != "--dry_run"])
    with importing():
        from train.fit import dry_run, fit

    if dry:
        print(dry_run(config))
        return 0
    outcome = fit(config)
    return 128 + outcome.signal if outcome is not None and outcome.signal else 0
