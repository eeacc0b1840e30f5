"""`omni-train demo`: read the command line, with errors before anything heavy is imported, and run the demonstration."""

from __future__ import annotations

import os
from collections.abc import Sequence

from omni.errors import UserError
from omni.utils.process import importing
from train.config.parse import read_run

HELP = """usage: omni-train demo [CONFIG.yaml] [--any.key value ...]

Train the small model of the recipe nano on two CPU cores until it answers 95 % of held-out questions, for 25 minutes at most,
examine it in voices that it has never heard, and talk to it. The model, a question, its answer, pictures and report.md are in
runs/nano afterwards. Keys of the configuration are overridden as for `fit` (`omni-train fit --help` lists them).

  --budget.minutes M    train for M minutes at most, as does DEMO_MINUTES=M in the environment"""


def main(argv: Sequence[str]) -> int:
    """Runs the command; arguments are those of `fit`, with the recipe `nano` as the default."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(HELP)
        return 0
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # two threads wait for each other idly where other programs are busy too
    words = list(argv)
    most = os.environ.get("DEMO_MINUTES")
    own = words if words and not words[0].startswith("-") else ["nano", *words]
    config = read_run([own[0], *([f"--budget.minutes={most}"] if most else []), *own[1:]])
    demonstrate = next((s.made.demonstrate for s in config.data.sources if hasattr(s.made, "demonstrate")), None)
    if demonstrate is None:
        raise UserError("the demonstration asks about spoken digits, but no source of the configuration is of that kind")
    with importing():
        import train.trainer.build  # noqa: F401

    return int(demonstrate(config))
