"""The training state on disk: written beside and renamed, read without running anything that was stored.

    checkpoints/
      step-00001200/          whole as soon as it has this name
        tensors/*.safetensors   model, optimizer and running average; one file, or one a process where they are sharded
        rng.safetensors         random states by process
        balance-0.safetensors   state of the balance of the tasks; one a process where it holds sharded gradients
        state.json              step, time, packer shards of the data, configuration, validation's figures
      last                    name of the newest checkpoint

Tensors have flat names (`model.…`, `optimizer.<parameter>.<key>`, `average.<parameter>`) and are read by slices, so that a
checkpoint written by any number of processes, sharded or not, is read by any other.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from omni.checkpoint.tensors import finite, save_tensors
from omni.errors import UserError
from omni.files import FULL, PASSING, refuse_pointer, sync, write_whole
from omni.lora.attach import adapted
from train.checkpoint.retention import FORMAT, LAST, STATE, discard, name_of, newest, read_state, way_back
from train.distributed.fabric import is_sharded
from train.distributed.process_group import ProcessGroup
from train.objective.objective import TEACHER
from train.optim.optimizer import STATE_KEYS, Average, Optimizers

TENSORS, RNG, BALANCE = "tensors", "rng.safetensors", "balance-{}.safetensors"


@dataclass
class Position:
    """The state of a run other than tensors, as plain data.

    Attributes:
        step: optimizer steps done.
        seconds: wall-clock time used, over all its starts.
        packer_shards: state of every packer of the data after the last batch that was used.
        validated: step and seconds of the last validation.
        figures: figures of the validation at this very step, if there was one.
        meters: sums since the last row of the log, of each process.
        scaler: state of the gradient scaler (16-mixed only).
        tally: figures of the balance since the last row of its table.
        rows: sizes of the stored sources, and the checksum of the weights below adapters, by their names in messages.
    """

    step: int = 0
    seconds: float = 0.0
    packer_shards: dict[str, Any] = field(default_factory=dict)
    validated: tuple[int, float] = (0, 0.0)
    saved: tuple[int, float] = (0, 0.0)
    figures: dict[str, float] = field(default_factory=dict)
    meters: list[list[float]] = field(default_factory=list)
    scaler: dict[str, Any] = field(default_factory=dict)
    tally: dict[str, list[float]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


class Training(NamedTuple):
    """What a run trains, and by what: its state is in these, and in the `Position`."""

    objective: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None


def tensors_of(training: Training) -> dict[str, Tensor]:
    """All tensors of the training state by flat name; they share memory with it. Frozen weights below adapters, and those of a
    teacher, are not stored, but read again from the model that the run started from."""
    module, optimizer, average = training
    whole = {name: t for name, t in module.state_dict().items() if not name.startswith(TEACHER)}
    flat = {f"model.{name}": t.detach() for name, t in whole.items() if not isinstance(t, str)}
    if adapted(module):
        moving = {name for name, p in module.named_parameters() if p.requires_grad} | {n for n, _ in module.named_buffers()}
        flat = {name: t for name, t in flat.items() if name.removeprefix("model.") in moving}
    for name, p in module.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            flat[f"optimizer.{name}.{key}"] = value.detach()
    if average is not None:
        flat.update({f"average.{name}": t for name, t in average.values.items()})
    return flat


@dataclass(frozen=True)
class CheckpointContent:
    """What the checkpoint of one step holds.

    Attributes:
        target: its folder.
        text: its `state.json`.
        random_states: of every process.
        tensors: those that this process writes; they share memory with the run, or are copies of it.
        sharded: they are slices, and every process writes its own.
        balance: state of the balance of the tasks, where this process writes one.
    """

    target: Path
    text: str
    random_states: list[dict[str, Tensor]]
    tensors: dict[str, Tensor]
    sharded: bool
    balance: dict[str, Tensor] | None


def capture(
    parent: Path,
    position: Position,
    config: Mapping[str, Any],
    training: Training,
    group: ProcessGroup,
    balance: Mapping[str, Tensor] | None = None,
) -> CheckpointContent:
    """Collects the state after a step, for a checkpoint under `parent`; all processes must call it."""
    sharded = is_sharded(training.objective)
    mine = group.first or sharded
    data = {"format": FORMAT, "processes": group.world, **asdict(position), "config": dict(config)}
    return CheckpointContent(
        parent / name_of(position.step),
        json.dumps(data) + "\n",
        group.gather(random_state(next(training.objective.parameters()).device)),
        tensors_of(training) if mine else {},
        sharded,
        dict(balance) if balance is not None and mine else None,
    )


def write(held: CheckpointContent, group: ProcessGroup) -> Path:
    """Write a checkpoint, over a group of saves alone where this runs beside the steps; all processes must call it.
    UserError for no room or right to write; what was there before is untouched."""
    target = held.target
    beside = target.with_name(f".{target.name}.writing")

    def make_room() -> None:
        if group.first:
            shutil.rmtree(beside, ignore_errors=True)
            (beside / TENSORS).mkdir(parents=True)

    def write_state() -> None:
        if held.sharded:
            writer = dcp.HuggingFaceStorageWriter(str(beside / TENSORS), save_distributed=True)
            dcp.save(held.tensors, storage_writer=writer, process_group=group.group)
        elif group.first:
            save_tensors(held.tensors, beside / TENSORS / "state.safetensors", checksum=False)
        if group.first:
            named = {f"{rank}.{name}": t for rank, state in enumerate(held.random_states) for name, t in state.items()}
            save_tensors(named, beside / RNG)
            (beside / STATE).write_text(held.text, encoding="utf-8")
        if held.balance is not None:
            save_tensors(held.balance, beside / BALANCE.format(group.rank), checksum=False)

    def publish() -> None:
        if group.first:
            sync(beside)
            if target.exists():
                discard(target)
            os.rename(beside, target)
            write_whole(target.with_name(LAST), target.name + "\n")

    def attempt(part: Callable[[], None]) -> None:
        try:
            part()
        except (OSError, MemoryError, CheckpointException, RuntimeError) as error:
            raise _cannot_write(target, error) from error

    try:
        for part in (make_room, write_state, publish):  # processes agree after each, so that none waits for one that has failed
            group.together(partial(attempt, part))
    except UserError:
        if group.first:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    return target


def _cannot_write(target: Path, error: BaseException) -> UserError:
    before: Path | None = None
    with suppress(OSError):  # the folder itself may be unreadable
        before = newest(target.parent)
    kept = f"the last good checkpoint is {before}" if before is not None else "there is no earlier one"
    marks = [mark for code in FULL for mark in (os.strerror(code), f"os error {code}")]
    full = getattr(error, "errno", None) in FULL or any(mark in str(error) for mark in marks)
    reason = ": no space left on the disk" if full else f" ({' '.join(str(error).split())[:300]})"
    way = "free some space" if full else "fix that"
    failure = UserError(f"checkpoint {target} cannot be written{reason}; {kept}; {way} and run the same command again")
    failure.again = not full and (not isinstance(error, OSError) or error.errno in PASSING)
    return failure


def load(folder: Path, training: Training, group: ProcessGroup, fresh: list[str] | None = None) -> Position:
    """Read a checkpoint into model, optimizer and average, in place; all processes must call it. `fresh` receives the
    parameters whose stored optimizer state is another rule's: theirs starts again. UserError for a file that is missing or
    truncated, and for other tensors."""
    data, (module, optimizer, _) = read_state(folder), training
    for file in [*folder.rglob("*.safetensors")]:
        refuse_pointer(file)
    try:
        reader = dcp.HuggingFaceStorageReader(str(folder / TENSORS))
        metadata = reader.read_metadata().state_dict_metadata
        if not metadata:
            raise FileNotFoundError(f"{TENSORS}/state.safetensors is missing")
        others = _state_of_other_rules(metadata, module, optimizer)
        left = tuple(f"optimizer.{name}." for name in others)
        stored = {name: meta for name, meta in metadata.items() if not name.startswith(left)}
        if fresh is not None:
            fresh += sorted(others)
        _allocate_optimizer_state(stored, module, optimizer)
        wanted = tensors_of(training)
        _compare_names(folder, wanted, stored)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(wanted, storage_reader=reader, no_dist=not is_sharded(module))
        states = load_file(folder / RNG)
    except (OSError, SafetensorError, CheckpointException, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"checkpoint {folder} cannot be read ({reason}); {way_back(folder)}") from error
    own = {name.split(".", 1)[1]: t for name, t in states.items() if name.startswith(f"{group.rank}.")}
    if own:
        set_random_state(own, next(module.parameters()).device)
    fields = {name: data[name] for name in Position.__dataclass_fields__ if name in data}
    fields["validated"], fields["saved"] = tuple(fields["validated"]), tuple(fields["saved"])
    return Position(**fields)


def check_weights(folder: Path, training: Training) -> None:
    """Refuse weights, or their average, that a checkpoint gave and that are not finite (UserError naming the first tensor).
    Each process looks at its own slices."""
    for name, tensor in tensors_of(training).items():
        if not name.startswith("optimizer.") and not finite(tensor.to_local() if isinstance(tensor, DTensor) else tensor):
            raise UserError(f"checkpoint {folder}: tensor {name} holds numbers that are not finite; {way_back(folder)}")


def load_balance(folder: Path, module: nn.Module, group: ProcessGroup) -> dict[str, Tensor] | None:
    """Read the state of the balance of the tasks from a checkpoint; None where it has none. UserError where it cannot be
    read, or holds gradients that were sharded over another number of processes."""
    stored = sorted(folder.glob(BALANCE.format("*")))
    if not stored:
        return None
    same = len(stored) == (group.world if is_sharded(module) else 1)
    file = folder / BALANCE.format(group.rank if same and len(stored) > 1 else 0)
    try:
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"checkpoint {folder} cannot be read ({file.name}: {error}); {way_back(folder)}") from error
    tasks = len(state["absences"])
    if not same and any(t.ndim > 1 and t.shape[1] > tasks for t in state.values()):
        raise UserError(
            f"checkpoint {folder} holds gradients of the balanced tasks, sharded over {len(stored)} process(es); go on with as "
            "many, and the same fabric.strategy, or say --resume restart"
        )
    return state


def _state_of_other_rules(stored: Mapping[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """Parameters whose stored optimizer state is not that of the rule that trains them now."""
    rules = {p: group.get("rule") for group in optimizer.param_groups for p in group["params"]}
    wanted = {name: STATE_KEYS.get(str(rules.get(p))) for name, p in module.named_parameters()}
    keys: dict[str, set[str]] = {}
    for name in stored:
        if name.startswith("optimizer."):
            parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
            keys.setdefault(parameter, set()).add(key)
    return {name for name, stored_keys in keys.items() if (entry := wanted.get(name)) is not None and entry not in stored_keys}


def _allocate_optimizer_state(stored: Mapping[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer's state as the checkpoint has it: small, or of a parameter's shape, and then of its type, as by
    `torch.optim.Optimizer.load_state_dict`. State that a rule allocates itself (in memory that is paged) is kept."""
    params = dict(module.named_parameters())
    fused = {p: bool(group.get("fused")) for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    for name, meta in stored.items():
        if not name.startswith("optimizer."):
            continue
        parameter, key = name[len("optimizer.") :].rsplit(".", 1)
        p = params.get(parameter)
        if p is None or p not in fused:
            continue
        if p not in optimizer.state and isinstance(optimizer, Optimizers):
            optimizer.allocate(p)
        own = optimizer.state[p].get(key)
        dtype = meta.properties.dtype
        alike = isinstance(own, Tensor) and tuple(own.shape) == tuple(meta.size)
        if alike and (own.dtype == dtype or (own.is_floating_point() and dtype.is_floating_point)):
            continue
        if tuple(meta.size) == tuple(p.shape) and key != "step":
            dtype = p.dtype if dtype.is_floating_point else dtype
            optimizer.state[p][key] = torch.zeros_like(p, dtype=dtype).detach()
        else:
            device = p.device if fused[p] or len(meta.size) else "cpu"
            optimizer.state[p][key] = torch.zeros(meta.size, dtype=dtype, device=device)


def _compare_names(folder: Path, wanted: Mapping[str, Tensor], stored: Mapping[str, Any]) -> None:
    own, there = ({name: list(t.shape) for name, t in wanted.items()}, {name: list(meta.size) for name, meta in stored.items()})
    for name in sorted(name for name in own.keys() | there.keys() if own.get(name) != there.get(name)):
        unlike = f"{there.get(name, 'missing')} there, and {own.get(name, 'missing')} in this configuration"
        raise UserError(f"checkpoint {folder}: the shape of {name!r} is {unlike}; was another model trained there?")


def seed_random(seed: int) -> None:
    """Seeds this process's random generators: PyTorch's, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """States of this process's random generators, as tensors; that of a GPU where the run is on one."""
    _, words, _ = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor(numpy_state["state"]["pos"]),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets the generators to what `random_state` gave, that of a GPU where the run is on one."""
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"].tolist()), None))
    words = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(state["numpy_position"]), 0, 0.0))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
