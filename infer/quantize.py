"""`omni-infer quantize`: writes a model folder again with its weights in fewer bits."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from infer.options import QuantizeOptions
from omni.checkpoint.places import WEIGHTS
from omni.convert.int8_folder import quantize_folder

LINE_SECONDS = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def quantize(options: QuantizeOptions) -> None:
    """Write the folder, showing the progress, and print what it holds; UserError as `quantize_folder` raises it."""
    source, target = Path(options.model), Path(options.out)
    before, started = (source / WEIGHTS).stat().st_size if (source / WEIGHTS).is_file() else 0, time.monotonic()
    with _Reading(not options.quiet) as shown:
        files = quantize_folder(source, target, options.format, shown)
    size, seconds = files[WEIGHTS].bytes, time.monotonic() - started
    print(f"{target}: {source} in {options.format}")
    for name, stamp in sorted(files.items()):
        print(f"  {name:<28}{stamp.bytes:>16,} bytes   crc32 {stamp.crc32:08x}")
    print(f"weights of {before / 1e9:.3g} GB became {size / 1e9:.3g} GB ({size / before:.1%}) in {seconds:.1f} s")


class _Reading:
    """Shows the share that is done: a bar on a terminal, a line every `LINE_SECONDS` elsewhere."""

    def __init__(self, on: bool) -> None:
        self.on, self.told = on, time.monotonic()
        terminal = on and sys.stderr.isatty()
        self.bar: Any = tqdm(unit="B", unit_scale=True, desc="quantising", leave=False) if terminal else None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self.bar is not None:
            self.bar.total = total
            self.bar.update(done - self.bar.n)
        elif self.on and now - self.told >= LINE_SECONDS:
            self.told = now
            print(f"quantising: {done / total:.0%} done", file=sys.stderr, flush=True)

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
