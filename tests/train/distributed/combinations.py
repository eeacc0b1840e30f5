"""Tries what goes with which layout of processes, and prints it as a table in Markdown.

`python -m tests.train.distributed.combinations` makes the table of docs/scaling.md; with a layout and a folder it makes that
layout's runs in the processes that torchrun, or `tests.processes`, has started.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omni.errors import UserError
from tests.guarded import child
from tests.processes import several
from tests.train.balance.toys import balanced_config, balanced_parts, tiny
from tests.train.toys import toy_fit
from train.balance.config import BalanceConfig
from train.config.sections import BudgetConfig, FabricConfig, LogConfig, LoRASection, OptimizerConfig
from train.distributed.fabric import leave
from train.trainer.logs import METRICS, read_table

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "fsdp, replicas": (2, {"strategy": "fsdp", "replicas": 2}),
    "fsdp, tensor_parallel": (2, {"strategy": "fsdp", "tensor_parallel": 2}),
}
"""Number of processes, and keys of `fabric`."""

ADAPTERS = LoRASection(targets=("decoder.blocks.*", "encoder.*"), rank=2, trainable=("projector.*",))
WITH: dict[str, dict[str, Any]] = {
    "all weights": {},
    "`lora`": {"lora": ADAPTERS},
    "`lora.quantize: nf4`": {"lora": replace(ADAPTERS, quantize="nf4")},
    "`balance` at level `loss`": {"balance": BalanceConfig("dwa")},
    "`balance` at level `features`": {"balance": BalanceConfig("mgda", level="features")},
    "`balance` at level `parameters`": {"balance": BalanceConfig("mgda", level="parameters")},
    "`guard`": {"guard": True},
    "`ema`": {"ema": 0.9},
    "Muon": {"optimizer": OptimizerConfig("muon", lr=3e-3, muon_lr=3e-3, weight_decay=0.0)},
    "`fabric.checkpointing`": {"fabric": {"checkpointing": True}},
    "`fabric.compile`": {"fabric": {"compile": True}},
    "`bf16-mixed`": {"fabric": {"precision": "bf16-mixed"}},
    "`bf16-true`": {"fabric": {"precision": "bf16-true"}},
}
"""Fields of a run's configuration, and keys of its `fabric`."""

FAR = 0.05
"""Relative distance of a run's last loss from that of one process: rounding in bf16 alone comes to 0.01."""


def take_runs(layout: str, folder: Path) -> None:
    """Make the runs of a layout; each leaves its last loss, or why it was refused."""
    count, keys = LAYOUTS[layout]
    for number, given in enumerate(WITH.values()):
        place = folder / f"{layout}-{number}"
        try:
            fields = {**given, "fabric": FabricConfig(accelerator="cpu", devices=count, **keys, **given.get("fabric", {}))}
            config = balanced_config(
                place,
                fields.pop("balance", None),
                log=LogConfig(every=1, progress="off"),
                budget=BudgetConfig(steps=2),
                **fields,
            )
            model = tiny()
            model = replace(model, decoder=replace(model.decoder, width=64, mlp_width=128))  # 4 bits come in blocks of 64
            toy_fit(config, balanced_parts(config, model))
            found: Any = read_table(place / METRICS)[-1]["loss"]
        except UserError as error:
            found = str(error)
        place.with_suffix(".json").write_text(json.dumps(found))


def try_all(layouts: Mapping[str, Any] = LAYOUTS) -> str:
    """The table: whether a run of each combination learns what one process learns, and why others are refused."""
    cells: dict[str, list[str]] = {name: [] for name in WITH}
    refused: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as place:
        for layout in layouts:
            ended = several(LAYOUTS[layout][0], __name__.replace("__main__", NAME), layout, place)
            for number, name in enumerate(WITH):
                first, found = (_read(Path(place) / f"{of}-{number}.json") for of in ("one process", layout))
                if isinstance(found, str):
                    cell = f"no ({refused.setdefault(found, len(refused) + 1)})"
                elif found is None:
                    cell = "fails"
                    print(f"{name}, {layout}: {ended[0].said[-2000:]}", file=sys.stderr)
                else:
                    cell = "yes" if first is None or abs(found - first) <= FAR * abs(first) else f"differs ({found:.3g})"
                cells[name].append(cell)
    rows = [f"| {name} | {' | '.join(row)} |" for name, row in cells.items()]
    head = [f"| | {' | '.join(layouts)} |", f"|---|{'---|' * len(layouts)}"]
    return "\n".join([*head, *rows, "", *(f"{number}. {text}" for text, number in refused.items())])


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


NAME = "tests.train.distributed.combinations"

if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(try_all())
    else:
        try:
            with child(), warnings.catch_warnings():
                take_runs(sys.argv[1], Path(sys.argv[2]))
        finally:
            leave()
