"""`omni-train`, `python -m train`, and the script that `fabric run train/__main__.py fit ...` starts."""

import sys
from pathlib import Path
from typing import NoReturn


def main() -> int:
    """Imports the command line when signals are handled already, and runs it."""
    from train.cli import main

    return main()


def script() -> NoReturn:
    """The console script `omni-train`. Unlike `python -m train` it finds this package whatever is in the present folder."""
    from omni.utils.process import lead

    lead(main)


if __name__ == "__main__":
    if __package__ in (None, ""):  # started by path: import from the parent of this folder
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    script()
