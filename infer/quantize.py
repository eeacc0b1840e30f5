"""`omni-infer quantize`: writes a model folder again with its weights in fewer bits."""

from __future__ import annotations

import time
from pathlib import Path

from infer.options import QuantizeOptions
from infer.progress import WorkBar
from omni.checkpoint.places import WEIGHTS
from omni.convert.omni_folder import quantize_folder
from omni.pretrained import find_model


def quantize(options: QuantizeOptions) -> None:
    """Write the folder, showing the progress, and print what it holds; UserError as `quantize_folder` raises it."""
    source, target = Path(find_model(options.model)), Path(options.out)
    before, started = (source / WEIGHTS).stat().st_size if (source / WEIGHTS).is_file() else 0, time.monotonic()
    with WorkBar("quantising", on=not options.quiet) as shown:
        files = quantize_folder(source, target, options.format, shown)
    size, seconds = files[WEIGHTS].bytes, time.monotonic() - started
    print(f"{target}: {source} in {options.format}")
    for name, stamp in sorted(files.items()):
        print(f"  {name:<28}{stamp.bytes:>16,} bytes   crc32 {stamp.crc32:08x}")
    print(f"weights of {before / 1e9:.3g} GB became {size / 1e9:.3g} GB ({size / before:.1%}) in {seconds:.1f} s")
