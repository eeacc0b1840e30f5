"""Runs checks by name, prints figures as they come, and collects them in one JSON file."""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from omni.engine.stats import Percentiles
from omni.utils.hardware import machine
from omni.utils.profiling import seconds_of

Figures = Iterator[tuple[str, dict[str, float]]]
Check = Callable[..., Figures]
"""Measures on a device and yields names and figures; True: a rehearsal at small size. Further options by their names."""


def run_checks(checks: Mapping[str, Check], description: str, **defaults: str) -> int:
    """Runs the checks that the command line names, all by default; one that raises does not stop the others.

    Args:
        defaults: further options; each goes to the checks with a parameter of its name.

    Returns:
        Exit code: 1 where a check raised.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(checks)}; all by default")
    parser.add_argument("--out", type=Path, help="JSON file; what other scripts wrote to it stays")
    parser.add_argument("--small", action="store_true", help="rehearse at small size, on a CPU too")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", default=default, help="%(default)s by default" if default else None)
    options = parser.parse_args()
    if unknown := [name for name in options.checks if name not in checks]:
        parser.error(f"no check is called {unknown[0]!r}; there are {', '.join(checks)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed = [name for name in options.checks or checks if not _run(name, checks[name], device, options)]
    return bool(failed)


def _run(name: str, check: Check, device: torch.device, options: argparse.Namespace) -> bool:
    start, figures, error = time.perf_counter(), dict[str, dict[str, float]](), None

    def keep() -> None:
        if options.out is not None:
            spent = round(time.perf_counter() - start, 1)
            _merge(options.out, device, name, {"seconds": spent, "error": error, "figures": figures})

    try:
        own = {name: vars(options)[name] for name in [*inspect.signature(check).parameters][2:]}
        for title, values in check(device, options.small, **own):
            figures[title] = values
            print(f"{name}: {title}: {', '.join(f'{key} {value:.4g}' for key, value in values.items())}", flush=True)
            keep()  # a check may be ended at its time limit
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        traceback.print_exc()
        keep()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return error is None


def _merge(path: Path, device: torch.device, name: str, result: dict[str, Any]) -> None:
    """Adds what a check found to the file."""
    whole = json.loads(path.read_text()) if path.is_file() else {"machine": describe(device), "checks": {}}
    whole["checks"][name] = result
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")


def in_ms(name: str, times: Percentiles) -> dict[str, float]:
    """Percentiles in milliseconds, by their names; none of nothing."""
    values = {part: getattr(times, part) for part in ("p50", "p95", "p99")}
    return {f"{name} {part} ms": 1e3 * value for part, value in values.items() if value is not None}


def describe(device: torch.device) -> dict[str, Any]:
    """Processor, GPU, and versions of torch and of its CUDA."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"gpu": gpu, "processor": machine()["processor"], "torch": torch.__version__, "cuda": torch.version.cuda}


Item = TypeVar("Item")


def in_turns(
    works: Mapping[str, Callable[[Item], Any]], items: Sequence[Item], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each of several works with each given item, `rounds` times after one that is not counted.

    All take an item one right after the other, in every other round in reverse order, so that changes of the machine's speed
    affect all alike.
    """
    spent: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for item in items:
            for name in works if turn % 2 else reversed(list(works)):
                seconds = seconds_of(partial(works[name], item), device)
                if turn:
                    spent[name].append(seconds)
    return spent


def ratio(taken: Sequence[float], beside: Sequence[float]) -> float:
    """Median of the ratios of times that were taken in one turn (see `in_turns`)."""
    return statistics.median(a / b for a, b in zip(taken, beside, strict=True))
