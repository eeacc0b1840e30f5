"""`python -m train`, and the script that `fabric run train/__main__.py fit ...` starts."""

import os
import sys
from pathlib import Path

# Threads of GNU's OpenMP that wait for one another keep their cores busy for a while, which the data worker then lacks: on two
# cores that is 2 % of a step. It is read once, before PyTorch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if __name__ == "__main__":
    if __package__ in (None, ""):  # started by path: this folder is no place to import from, its parent is
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from train.cli import main

    sys.exit(main())
