"""Write golden files again: `python -m tests.golden.write help.json`. tests/test_golden.py says what they are for.

Only what is named is written. Twice on one machine gives the same bytes; times are left out, and paths are relative.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: sums are then the same every time

import numpy as np
import torch

from tests.golden import faces
from tests.golden.toys import HERE, inside

FOLDERS = ("model", "rows", "checkpoint", "adapter", "edits")


def make(place: Path) -> dict[str, Any]:
    """All folders, in a place to work in; the golden data by name of their files."""
    faces.save_model(Path("model"))
    faces.prepare_rows(Path("prepared"))
    shutil.copytree("prepared", "rows")
    for file in (*Path("rows").glob("*.json"), Path("rows/broken.csv")):
        file.write_text(file.read_text().replace(f"{place}/", ""))
    random.seed(0)
    np.random.seed(0)
    training = faces.train()
    faces.keep_checkpoint(Path("whole"), Path("checkpoint"))
    shutil.copytree("lora/adapter", "adapter")
    faces.teach("taught")
    shutil.copytree("taught", "edits")
    return {
        "state_dicts": faces.state_dicts(),
        "answers": faces.every_answer(),
        "rows": faces.rows(),
        "training": training,
        "exports": faces.exports(),
        "json_outputs": faces.json_outputs(),
        "csv_headers": faces.csv_headers(),
        "tensor_files": faces.tensor_files(),
        "help": faces.helps(),
        "public_names": faces.public_names(),
    }


def in_lines(data: Any) -> str:
    """JSON with a line for each key, and no more."""
    if not isinstance(data, dict) or not data:
        return json.dumps(data, ensure_ascii=False)
    lines = [f"{json.dumps(key)}: {in_lines(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def main(names: list[str]) -> None:
    known = [*FOLDERS, *(file.name for file in HERE.glob("*.json"))]
    if not names or not set(names) <= set(known):
        sys.exit(f"give the names of what to write, of {', '.join(sorted(known))}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, inside(Path(folder).resolve()) as place:
        made = make(place)
        for name in names:
            if name not in FOLDERS:
                (HERE / name).write_text(in_lines(made[name.removesuffix(".json")]) + "\n", encoding="utf-8")
            else:
                shutil.rmtree(HERE / name, ignore_errors=True)
                shutil.copytree(place / name, HERE / name)


if __name__ == "__main__":
    main(sys.argv[1:])
