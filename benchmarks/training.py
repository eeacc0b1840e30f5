"""`python -m benchmarks.training`: the objective against the plain one, the training step, data made while training, the
balance of tasks, the graph guard, bf16, checkpoints, converting weights, preparing data, and reading it.

Every ratio compares two ways of doing the same work in one run, on one machine.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Literal

from benchmarks.names import BALANCED, OF_RECIPE, SECTIONS
from omni.errors import UserError
from omni.hardware import check_device
from omni.process import importing, say
from train.console.command import check_config, find_config
from train.console.options import Parser, check_least
from train.console.tables import print_table


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = Parser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, or auto: a GPU where there is one")
    parser.add_argument(
        "--only",
        type=list[
            Literal["objective", "step", "data", "balance", "guard", "precision", "checkpoint", "convert", "prepare", "reading"]
        ],
        default=list(SECTIONS),
        help="which tables, such as [step,data]; convert and checkpoint write 6 GB of temporary files each, checkpoint holds "
        "9 GB of memory",
    )
    parser.add_argument("--positions", type=int, default=2048, help="positions of the objective's table")
    parser.add_argument(
        "--config", type=str, default="nano-scratch", help="recipe of the tables of data, balance, guard, precision, checkpoint"
    )
    parser.add_argument(
        "--methods", type=list[str], default=list(BALANCED), help="of the balance's table: METHOD or METHOD:LEVEL each"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="instead of tables: five checks of what differs on a GPU, in 7 minutes"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a table, or a check, instead of text")
    options = Namespace(**parser.read(argv))
    check_device(options.device)
    check_least(vars(options), positions=1)
    if not options.only:
        raise UserError(f"--only is empty; give tables, such as [{SECTIONS[0]}], or leave it out")
    if not options.gpu and set(OF_RECIPE) & set(options.only):
        check_config(find_config(options.config))
    with importing():
        import torch

        from benchmarks.child import check_gpu
        from benchmarks.tables import sections

    if options.gpu:
        return check_gpu(options.json)
    name = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was asked for, but this machine has no GPU that PyTorch can use; leave it out")
    if not options.json:
        say(f"measuring {', '.join(options.only)} on {name}; each table takes seconds to minutes")
    for title, rows in sections(device, options.only, options.positions, options.config, options.methods):
        if options.json:
            print(json.dumps({"table": title, "rows": {row.name: row.value for row in rows}}), flush=True)
            continue
        print_table(title, ("", "", ""), [(row.name, f"{row.value:.4g}", row.unit) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
