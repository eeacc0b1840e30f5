"""Checkpoints of a run folder, of which the newest and the best are kept, and checks that a run can go on from it with this
configuration."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import yaml

from omni.errors import UserError
from omni.files import write_whole
from train.config.sections import CheckpointConfig

FORMAT = 1
STATE, LAST = "state.json", "last"
RUN_FILES = (
    *("checkpoints", "tensorboard", "validation", "metrics.csv", "validation.csv", "balance.csv", "unused.csv"),
    *("curves.png", "spectrogram.png", "balance.png", "highest_loss.jsonl", "profile"),
)
"""Files and folders of a run folder that `resume: restart` deletes."""
RESTARTED = ".restarted"  # file in a run folder: names of the launch that `resume: restart` has cleared it in
CONFIG, RESULTS = "config.yaml", ("model", "adapter")
"""The configuration in a run folder, and what a finished run leaves there."""


def read_state(folder: Path) -> dict[str, Any]:
    """Read the `state.json` of a checkpoint; UserError where it is missing, damaged, or of another version."""
    file = folder / STATE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        lacking = [key for key in ("format", "step", "config") if not isinstance(data, dict) or key not in data]
        if lacking:
            raise ValueError(f"{STATE} has no {lacking[0]!r}")
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {folder} cannot be read ({error}); {way_back(folder)}") from error
    if data["format"] != FORMAT:
        raise UserError(
            f"{file} has format {data['format']!r}, and this version reads format {FORMAT}; go on with the version that wrote "
            f"it, or else: {way_back(folder)}"
        )
    return dict(data)


def way_back(folder: Path) -> str:
    """The advice that ends the message about a damaged checkpoint."""
    earlier = [checkpoint for checkpoint in checkpoints(folder.parent) if int(checkpoint.name[5:]) < int(folder.name[5:])]
    if earlier:
        return f"delete it to go on from {earlier[-1]}"
    return "there is no earlier one: --resume restart trains from the start"


def name_of(step: int) -> str:
    """Name of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def checkpoints(parent: Path) -> list[Path]:
    """Whole checkpoints under a folder, oldest first."""
    folders = [p for p in parent.glob("step-*") if p.is_dir() and p.name[5:].isdigit()] if parent.is_dir() else []
    return sorted(folders, key=lambda p: int(p.name[5:]))


def newest(parent: Path) -> Path | None:
    """The checkpoint that `last` names, or else the newest."""
    pointer = parent / LAST
    if pointer.is_file():
        name = pointer.read_text(encoding="utf-8").strip()
        if name and (parent / name).is_dir():
            return parent / name
    return next(reversed(checkpoints(parent)), None)


def best(parent: Path, keep: CheckpointConfig) -> list[tuple[float, Path]]:
    """The `keep_best` checkpoints of the best `metric` with its values, best first, of equal ones the older first. Those at
    which it was not measured, or not finite, are left out."""
    scored = [(read_state(folder)["figures"].get(keep.metric), folder) for folder in checkpoints(parent)]
    measured = [(value, folder) for value, folder in scored if value is not None and math.isfinite(value)]
    return sorted(measured, key=lambda entry: -entry[0] if keep.good == "max" else entry[0])[: keep.keep_best]


def discard(folder: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that a half-deleted one is never taken for whole."""
    away = folder.with_name(f".{folder.name}.deleting")
    shutil.rmtree(away, ignore_errors=True)
    os.rename(folder, away)
    shutil.rmtree(away, ignore_errors=True)


def delete_unfinished(parent: Path) -> None:
    """Delete the half-written and half-deleted checkpoints of a killed run."""
    for pattern in (".step-*.writing", ".step-*.deleting", ".step-*.uploading"):
        for path in parent.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def check_run_folder(folder: Path, restart: bool) -> None:
    """Refuse (UserError) a folder in which a run would overwrite, or `restart` delete, anything that is not an earlier
    run's, and a finished run without checkpoints, which would be trained again from the start, unless `restart` is given."""
    checkpoint = newest(folder / "checkpoints")
    if checkpoint is not None and (checkpoint / STATE).is_file():
        return
    try:
        written = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        written = None
    if not isinstance(written, dict) or not {"run_folder", "budget", "model", "data", "optimizer"} <= written.keys():
        for name in (*RUN_FILES, CONFIG, *RESULTS, "model.safetensors"):
            if (folder / name).exists():
                raise UserError(f"run_folder {folder} holds {name!r}, but not of a run: name a new or empty folder")
    elif not restart:
        for name in RESULTS:
            if (folder / name).exists():
                raise UserError(
                    f"run_folder {folder} has the {name} of a finished run, but no checkpoint to resume from: give --resume "
                    "restart to train again, or name another folder"
                )


def restart(folder: Path, launch: Set[str], again: bool) -> bool:
    """Delete an earlier run's files, unless this launch, of these names (`train.distributed.fabric.launch_names`), did so
    before its processes were started `again`: False then, where the run in the folder is gone on with."""
    marker = folder / RESTARTED
    if again and marker.is_file() and launch & set(marker.read_text(encoding="utf-8").splitlines()):
        return False
    for name in RUN_FILES:  # an exported model stays until there is a new one
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if launch:
        write_whole(marker, "".join(f"{name}\n" for name in sorted(launch)))
    return True


IGNORED_KEYS = (
    "run_folder", "resume", "fabric.accelerator", "fabric.devices", "fabric.num_nodes", "fabric.strategy", "fabric.replicas",
    "fabric.tensor_parallel", "fabric.checkpointing", "fabric.compile", "fabric.deterministic", "fabric.timeout_seconds",
    "checkpoint", "validation", "log", "data.workers", "data.prefetch",
    "data.broken_limit", "guard", "objective.chunk", "model.tokenizer", "model.codec_folder", "model.init_from",
)  # fmt: skip
"""Keys that may differ between the starts of a run: they do not change the training but for rounding, or they are paths."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> list[tuple[str, Any, Any]]:
    """List the keys whose values differ, with the old and the new value; keys in `IGNORED_KEYS` are left out."""
    changes: list[tuple[str, Any, Any]] = []
    for name in dict.fromkeys((*old, *new)):
        key = f"{where}{name}"
        a, b = old.get(name), new.get(name)
        if key in IGNORED_KEYS or a == b:
            continue
        if isinstance(a, Sequence) and isinstance(b, Sequence) and len(a) == len(b) and not isinstance(a, str):
            a, b = ({f"[{i}]": value for i, value in enumerate(items)} for items in (a, b))
            changes += differences(a, b, key)
        elif isinstance(a, Mapping) and isinstance(b, Mapping):
            changes += differences(a, b, f"{key}.")
        else:
            changes.append((key, a, b))
    return changes


def check_resumable(folder: Path, before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], extend: bool) -> None:
    """Refuse to resume the run in `folder` with another configuration or other data: UserError naming the first difference
    between `before` and `now`, each configuration and sizes of the data; under `extend` the budget may differ."""
    changes = [entry for pair in zip(before, now, strict=True) for entry in differences(*pair)]
    budget = [(old, new) for key, old, new in changes if key.startswith("budget.")]
    larger = all(new is None or (old is not None and new > old) for old, new in budget)
    for key, old, new in changes:
        if extend and key.startswith("budget."):
            continue
        way = "--resume extend (go on with a larger budget), " if key.startswith("budget.") and larger else ""
        started = "without a limit" if old is None and key.startswith("budget.") else f"with {brief(old)}"
        raise UserError(
            f"{key} is {brief(new)}, but the run in {folder} was started {started}; set it back, choose another "
            f"--run_folder, or say {way}--resume restart (start over) or --resume force (go on all the same)"
        )


def brief(value: Any) -> str:
    """Format a value for an error message, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
