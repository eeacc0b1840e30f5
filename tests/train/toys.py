"""A tiny run for tests of the loop: a model of two streams, and data that are a pure function of shard and step.

`python -m tests.train.toys '{"folder": ..., ...}'` runs it as a program, for tests with several processes and signals.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from omni.checkpoint.tensors import save_tensors
from omni.convert.lazy import lazies_of
from omni.errors import UserError
from tests.guarded import child
from train.checkpoint import retention, state
from train.config.run import FitConfig
from train.config.sections import (
    BudgetConfig,
    CheckpointConfig,
    FabricConfig,
    LogConfig,
    LoRASection,
    ModelSection,
    OptimizerConfig,
    ScheduleConfig,
    ValidationConfig,
)
from train.data.config import DataConfig, SourceConfig
from train.distributed.fabric import build_fabric, leave, quantized_type
from train.distributed.process_group import ProcessGroup, launch, lost_named
from train.objective.objective import HEADS, Losses
from train.trainer.build import build_loop, process_group
from train.trainer.initial_model import apply_lora
from train.trainer.parts import Callback, Outcome, Parts
from train.trainer.usage import NONE

STREAMS, TASKS, WORDS, WIDTH = ("audio0", "text"), ("A1A2", "T1T2"), 17, 32
OF_THE_MACHINE = {"seconds", "tokens_per_second", "data_wait", "memory/peak"}
"""Columns of `metrics.csv` that differ between two runs of the same."""
ALONE = ProcessGroup(SimpleNamespace(global_rank=0, world_size=1))  # type: ignore[arg-type]


@dataclass
class ToyBatch:
    """Rows of [R, T] ids per stream, [R, K, T], with targets (-100 for none) and a task per row."""

    tokens: Tensor
    targets: Tensor
    task: Tensor
    positions: int
    state: dict[str, Any]

    def to(self, device: torch.device) -> ToyBatch:
        return replace(self, tokens=self.tokens.to(device), targets=self.targets.to(device), task=self.task.to(device))


class ToyModel(nn.Module):
    """Embeddings of two streams, two blocks, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.text_embedding = nn.Embedding(WORDS, WIDTH)
        self.audio_embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.text_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.audio_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.audio_embedding(tokens[:, 0]) + self.text_embedding(tokens[:, 1])
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


class ToyObjective(nn.Module):
    """Cross-entropy of both streams with the interface of `train.objective.objective.Objective`."""

    def __init__(self, model: ToyModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: ToyBatch, denominators: Tensor, progress: float = 1.0) -> Losses:
        hidden = self.model(batch.tokens)
        total = hidden.new_zeros(())
        sums, counts = (torch.zeros(len(TASKS), 2, dtype=torch.float32, device=hidden.device) for _ in "ab")
        for k, head in enumerate((self.model.audio_head, self.model.text_head)):
            logits = head(hidden)
            each = F.cross_entropy(logits.transpose(1, 2), batch.targets[:, k], reduction="none")  # [R, T]
            total = total + each.sum() / denominators[k].clamp_min(1)
            sums[:, k].index_add_(0, batch.task, each.detach().float().sum(1))
            counts[:, k].index_add_(0, batch.task, (batch.targets[:, k] != -100).float().sum(1))
        return Losses(total, sums, counts, total.new_zeros(()), total.new_zeros(()))


def toy_batch(shard: int, step: int) -> ToyBatch:
    """Shards differ in how much they supervise, so that a mean of means would not be the mean."""
    dice = torch.Generator().manual_seed(1000 * shard + step)
    tokens = torch.randint(WORDS, (2, 2, 6), generator=dice)
    targets = (tokens * 3 + 1) % WORDS
    share = torch.tensor(0.15 + 0.25 * (shard % 4))
    targets[torch.rand(targets.shape, generator=dice) > share] = -100
    state = {"packer_shard": shard, "packer_part": 0, "next": step + 1}
    return ToyBatch(tokens, targets, torch.tensor([shard % 2, step % 2]), int(tokens.shape[0] * 6), state)


def toy_steps(
    shards: Sequence[int], start: int, states: Mapping[str, Any], before: Callable[[int], None] = lambda step: None
) -> Iterator[list[ToyBatch]]:
    """A step's batches; where there are states, they and not the step say where the shards stand."""
    places = {shard: states[f"{shard}.0"]["next"] if states else 0 for shard in shards}
    while True:
        before(min(places.values(), default=0))
        yield [toy_batch(shard, step) for shard, step in places.items()]
        places = {shard: step + 1 for shard, step in places.items()}


def toy_targets(batch: ToyBatch) -> Tensor:
    return torch.cat([(batch.targets != -100).sum((0, 2)), torch.zeros(HEADS, dtype=torch.long)])


def toy_held_out(rank: int, world: int) -> list[ToyBatch]:
    """Five batches shared by the processes, equally many each: where they do not divide evenly some have an empty one."""
    own = [toy_batch(shard, 1000) for shard in range(5)][rank::world]
    empty = ToyBatch(*(t[:0] for t in (own[0].tokens, own[0].targets, own[0].task)), 0, {})
    return own + [empty] * (-(-5 // world) - len(own))


def toy_config(folder: Path | str, **changes: Any) -> FitConfig:
    """A configuration of eight steps, of which any field can be changed."""
    base: dict[str, Any] = {
        "budget": BudgetConfig(steps=8),
        "model": ModelSection(preset="nano"),
        "data": DataConfig((SourceConfig("stored", path="toys"),), micro_batches=4),
        "run_folder": str(folder),
        "fabric": FabricConfig(accelerator="cpu", devices=1),
        "optimizer": OptimizerConfig(lr=1e-2),
        "schedule": ScheduleConfig(warmup_steps=2),
        "checkpoint": CheckpointConfig(every_minutes=None),
        "log": LogConfig(every=1, progress="off"),
        "ema": 0.9,
    }
    return FitConfig(**{**base, **changes})


def toy_parts(before: Callable[[int], None] = lambda step: None, **changes: Any) -> Parts:
    """Parts of a run with a fixed random model."""
    torch.manual_seed(0)
    parts = Parts(
        objective=ToyObjective(ToyModel()),
        steps=lambda shards, start, states: toy_steps(shards, start, states, before),
        targets=toy_targets,
        streams=STREAMS,
        tasks=TASKS,
    )
    return replace(parts, **changes)


def toy_lora(base: Any = True) -> LoRASection:
    """Adapters on the blocks and a head that learns, on a base that is quantised where `base` says how."""
    quantize = base if isinstance(base, str) else None
    return LoRASection(
        ("blocks.*",),
        rank=2,
        trainable=("audio_head.*",),
        quantize=quantize,
        quantize_targets=("blocks.*",),  # type: ignore[arg-type]
    )


def adapted_parts(section: LoRASection, before: Callable[[int], None] = lambda step: None, precision: str = "32-true") -> Parts:
    """The same model with adapters."""
    parts = toy_parts(before)
    base = apply_lora(parts.objective.get_submodule("model"), section, quantized_type(precision))
    return replace(parts, rows={"the checksum of the weights below the adapters": base})


def assert_adapters_learn(folder: Path | str, section: LoRASection) -> None:
    """Nearly every value of A and B in a run's last checkpoint has had a gradient, and is another one than at the beginning."""
    found, begun = final_tensors(folder), adapted_parts(section).objective.state_dict()
    pairs = {name: t for name, t in begun.items() if ".lora." in name}
    assert len(pairs) == 4
    for name, before in pairs.items():
        assert (found[f"optimizer.{name}.exp_avg_sq"] > 0).float().mean() > 0.95, name
        after = found[f"model.{name}"]
        assert (after != before.to(after.dtype)).float().mean() > 0.95, name


class FailingCallback(Callback):
    """Fails after a step."""

    name = "failing"

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        if step == self.step:
            raise ValueError("a mistake of its own")


def toy_fit(
    config: FitConfig, parts: Parts | None = None, callbacks: Sequence[Callback] = (), profile: range = NONE
) -> tuple[Outcome, dict[str, Tensor]]:
    """Run it in this process; the outcome, and model and average by name."""
    fabric = build_fabric(config.fabric)
    launch(fabric)
    group = process_group(config, fabric)
    parts = parts or toy_parts()
    if config.validation.every_steps is not None and parts.validate is None:
        parts = replace(parts, held_out=toy_held_out(fabric.global_rank, fabric.world_size))
    folder = Path(config.run_folder)
    with lost_named(group):
        loop = build_loop(config, parts, fabric, folder, group, callbacks, profile)
        outcome = loop.run()
    weights = {f"model.{k}": v.detach().clone() for k, v in loop.validation.parts.objective.state_dict().items()}
    average = loop.checkpointer.training.average
    if average is not None:
        weights.update({f"average.{k}": v.clone() for k, v in average.values.items()})
    return outcome, weights


def final_tensors(folder: Path | str) -> dict[str, Tensor]:
    """Every tensor of a run's last checkpoint, whole, however it was sharded."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    place = retention.newest(Path(folder) / "checkpoints")
    assert place is not None
    reader = HuggingFaceStorageReader(str(place / "tensors"))
    metas = reader.read_metadata().state_dict_metadata
    out = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in metas.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(out, storage_reader=reader, no_dist=True)
    return out


def lose(how: str, seconds: float) -> None:
    """Have this process sleep, stop, die, or fail, before a step."""
    if how == "sleep":
        time.sleep(seconds or 1e6)
    elif how == "stop":
        later = f"sleep {seconds}; kill -CONT {os.getpid()}" if seconds else f"sleep 8; kill -KILL {os.getpid()}"
        subprocess.Popen(["sh", "-c", later])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "write":
        state.write = lambda *args: lose("stop", seconds)  # type: ignore[assignment]
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "fail":
        raise RuntimeError("a mistake of its own")


def hold_writer(name: str, step: int) -> threading.Event:
    """Makes a function of `train.checkpoint.state` wait for the event that this returns where it writes a step's checkpoint."""
    real, release = getattr(state, name), threading.Event()
    release.reached = threading.Event()  # type: ignore[attr-defined]

    def later(written: Any, *args: Any) -> Any:
        if retention.name_of(step) in str(getattr(written, "target", written)):
            release.reached.set()  # type: ignore[attr-defined]
            assert release.wait(60)
        return real(written, *args)

    setattr(state, name, later)
    return release


def toy_export(path: str, fails: bool) -> Callable[[Mapping[str, Tensor]], Path]:
    """Writes the weights, or fails at the third one that it reads. Says how many gathered weights were alive at once."""
    gathered: list[StorageWeakRef] = []
    most, full = 0, DTensor.full_tensor

    def counted(self: DTensor, **options: Any) -> Tensor:
        nonlocal most
        tensor = full(self, **options)
        gathered.append(StorageWeakRef(tensor.untyped_storage()))
        most = max(most, sum(not ref.expired() for ref in gathered))
        return tensor

    def export(weights: Mapping[str, Tensor]) -> Path:
        DTensor.full_tensor = counted  # type: ignore[method-assign]
        try:
            for number, name in enumerate(weights if fails else ()):
                if number == 2:
                    raise UserError(f"{path} is on a full disk")
                assert weights[name].isfinite().all()
            save_tensors(lazies_of(weights), Path(path))
        finally:
            DTensor.full_tensor = full  # type: ignore[method-assign]
        print(f"gathered {len(gathered)} weights, {most} at once")
        return Path(path)

    return export


def main(options: dict[str, Any]) -> int:
    """One run, or `runs`, one after another in the same processes.

    Options of a run: folder, fabric and optimizer (their fields), steps, every (steps between checkpoints), rows (steps between
    rows of the log), validate (steps between validations), lora (true, or how the base is quantised), guard, kill: [signal,
    step] (the first process sends itself a signal before that step), block: [path, step] (before that step it puts a folder
    that is not empty where a checkpoint's file belongs, or, where the path ends in `writing`, a file in place of the folder),
    callback (a step after which a callback fails), resume, answers (seconds that validation's answers take), lose: [rank, step,
    how, seconds] (before that step a process sleeps, is stopped for these seconds (0: for ever), is killed, or fails; or it is
    stopped where it writes the next checkpoint: `write`),
    asynchronous (true but for a run that kills itself at once: its checkpoints are there when their step is over), hold:
    [function, step, until] (a function of `train.checkpoint.state` waits where it writes the checkpoint of that step, until
    this process fetches the data of another), export: [file, fails] (see `toy_export`).
    """
    code = 0
    for run in options.get("runs", [options]):
        kill, block, lost, hold = run.get("kill"), run.get("block"), run.get("lose"), run.get("hold")
        release = hold_writer(*hold[:2]) if hold else None

        def before(
            step: int, kill: Any = kill, block: Any = block, run: Any = run, hold: Any = hold, release: Any = release
        ) -> None:
            if release is not None and step >= hold[2]:
                release.set()
            if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0":
                return
            if kill and step == kill[1]:
                if release is not None and not release.is_set():  # it writes as far as it is held
                    assert release.reached.wait(60)
                os.kill(os.getpid(), getattr(signal, kill[0]))
            if block and step == block[1]:
                path = Path(run["folder"]) / "checkpoints" / block[0]
                path.unlink(missing_ok=True)
                if path.name.endswith("writing"):
                    path.write_text("in the part")
                else:
                    (path / "in the part").mkdir(parents=True)

        def losing(step: int, before: Any = before, lost: Any = lost) -> None:
            before(step)
            if lost and [int(os.environ.get("RANK", "0")), step] == lost[:2]:
                lose(*lost[2:])

        lora = toy_lora(run["lora"]) if run.get("lora") else None
        config = toy_config(
            run["folder"],
            lora=lora,
            resume=run.get("resume", "auto"),
            guard=run.get("guard", False),
            fabric=FabricConfig(**{"accelerator": "cpu", **run.get("fabric", {})}),
            budget=BudgetConfig(steps=run.get("steps", 8)),
            optimizer=OptimizerConfig(**{"lr": 1e-2, **run.get("optimizer", {})}),
            checkpoint=CheckpointConfig(
                every_steps=run.get("every", 3),
                every_minutes=None,
                metric="loss",
                asynchronous=run.get("asynchronous", not kill or kill[0] != "SIGKILL"),
            ),
            validation=ValidationConfig(every_steps=run.get("validate")),
            log=LogConfig(every=run.get("rows", 1), progress="lines"),
        )
        try:
            parts = toy_parts(losing) if lora is None else adapted_parts(lora, losing, config.fabric.precision)
            if seconds := run.get("answers"):
                parts = replace(parts, validate=lambda weights, step, seconds=seconds: {"slow": time.sleep(seconds) or 1.0})
            if run.get("export"):
                parts = replace(parts, export=toy_export(*run["export"]))
            failing = [FailingCallback(run["callback"])] if run.get("callback") else []
            outcome, _ = toy_fit(config, parts, failing)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.code
        code = 128 + outcome.signal if outcome.signal else 0
    return code


if __name__ == "__main__":
    try:
        with child():
            code = main(json.loads(sys.argv[1]))
    finally:
        leave()
    sys.exit(code)
