"""Plans a run before it is started (`omni-train plan`): parameters, memory on each device, pace, and the keys to turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import psutil
import torch

from omni.errors import UserError
from omni.model.speech_model import SpeechModel
from omni.utils.charts import print_table
from omni.utils.hardware import PEAK_FLOPS, peak_flops
from omni.utils.profiling import GIB
from train.config.run import FitConfig
from train.console.progress import duration, short
from train.data.batching.loader import PackerShard
from train.data.build import build_pipeline
from train.distributed.sharding import ParallelDims
from train.objective.objective import targets
from train.plan.memory import Memory, estimate, meta_model, worst_batch
from train.trainer.build import with_alignment
from train.trainer.initial_model import build_initial, shape_of
from train.trainer.metrics import StepFlops
from train.trainer.preflight import check_machine, check_resume, check_start

CUDA_CONTEXT, WASTE = 0.6 * GIB, {"cuda": 0.05, "cpu": 0.25}
"""Bytes of a GPU that the driver takes, and the share of a device that its allocator keeps in freed blocks (on a CPU 11 to 30 %
of what is in use were measured, with checkpointing more in small models)."""
MANY = (2, 4, 8, 16, 32, 64)
"""Numbers of devices that fsdp is tried on."""


@dataclass(frozen=True)
class Knob:
    """A change of a run: its options, its price, and the bytes that a device then needs and saves."""

    keys: str
    price: str
    config: FitConfig
    total: float
    saved: float


@dataclass(frozen=True)
class Plan:
    """A run's plan.

    Attributes:
        counts: parameters by part: all, and the trainable ones.
        limit: bytes of a device that the run may fill; None where they are not known.
        pace: of a step over all devices; None for what is not known.
        refused: why `fit` would not start it; notes: what this machine lacks for a run of another one, and what is not counted.
    """

    counts: dict[str, tuple[int, int]]
    memory: Memory
    devices: int
    strategy: str
    device: str
    limit: float | None
    pace: dict[str, Any]
    knobs: list[Knob]
    refused: list[str]
    notes: list[str]

    @property
    def fits(self) -> bool | None:
        return None if self.limit is None else self.memory.total <= self.limit

    @property
    def problems(self) -> list[str]:
        """Why the run cannot be: one line each."""
        if self.limit is None or self.fits:
            return self.refused
        needed = f"{self.memory.phase} needs {self.memory.total / GIB:.2f} GiB on each device"
        return [f"the run does not fit: {needed}, of which {self.limit / GIB:.2f} GiB can be filled", *self.refused]

    def plain(self) -> dict[str, Any]:
        """The plan as plain data; memory in bytes."""
        own = {f.name: getattr(self, f.name) for f in fields(self)} | {"fits": self.fits, "problems": self.problems}
        own["memory"] = {**asdict(self.memory), "total": self.memory.total, "phase": self.memory.phase}
        return own | {"knobs": [{k: v for k, v in vars(knob).items() if k != "config"} for knob in self.knobs]}


def make_plan(
    config: FitConfig, devices: int | None = None, gpu_gib: float | None = None, gpu: str | None = None, mfu: float = 0.35
) -> Plan:
    """Plans a run; for the arguments see `train.commands.fit.PLAN_HELP`. UserError for whatever is wrong with them, or with the
    configuration."""
    configured, config, described = config, with_alignment(config), gpu is not None or gpu_gib is not None
    shape, device_type = shape_of(config.model), kind_of(config, described)
    config = placed(config, devices, device_type)
    world, cuda = config.fabric.processes or 1, device_type == "cuda"
    here = devices is None and not described and (not cuda or torch.cuda.is_available())
    config, larger = config.shared_by(ParallelDims.of(config.fabric, world).data)
    words, limit = _room(device_type, gpu_gib, gpu, world)
    model = meta_model(config, shape)
    memory = estimate(config, model, cuda)
    refused, notes = _refused(configured, config, here)
    notes += [note for note in (larger, memory.uncounted) if note]
    speed = PEAK_FLOPS[gpu] if gpu else peak_flops(torch.device(device_type)) if here and cuda else None
    run = pace(config, model, world, speed and speed * mfu)
    knobs, most = list[Knob](), MANY[-1] if cuda else world
    if limit is not None and memory.total > limit:
        knobs = savings(config, model, memory.total, most, cuda, limit=limit)
    if devices is not None:  # which is stronger than fabric.devices
        knobs = [replace(knob, keys=knob.keys.replace("--fabric.devices", "--devices")) for knob in knobs]
    strategy = {"auto": "ddp" if world > 1 else "one process"}.get(config.fabric.strategy, config.fabric.strategy)
    refused = refused or [run["problem"]] * bool(run["problem"])
    return Plan(count_parameters(model), memory, world, strategy, words, limit, run, knobs, refused, notes)


def count_parameters(model: SpeechModel) -> dict[str, tuple[int, int]]:
    """Number of parameters by part: all, and the trainable ones; a text head that is the text table counts as a table."""
    every, own = Counter[str](), Counter[str]()
    for name, p in model.named_parameters():
        words = name.split(".")[: 2 if name.startswith("decoder.") else 1]
        part = "LoRA" if ".lora." in name else " ".join(words).replace("_", " ")
        every[part] += p.numel()
        own[part] += p.numel() * p.requires_grad
    return {part: (n, own[part]) for part, n in every.items()}


def kind_of(config: FitConfig, described: bool = False) -> str:
    """The kind of device of a run: as configured, else what this machine has; one `described` by size or name is a GPU. A Mac's
    GPU is counted as a CPU."""
    asked, mac = config.fabric.accelerator, torch.backends.mps.is_available()
    gpu = asked == "cuda" or (asked == "gpu" and not mac) or (asked == "auto" and torch.cuda.is_available())
    return "cuda" if asked != "mps" and (gpu or described) else "cpu"


def placed(config: FitConfig, devices: int | None, device_type: str) -> FitConfig:
    """Sets the number of devices where it is given or left open; more than eight are so many machines of eight."""
    fabric = config.fabric
    if devices is not None:
        asked = (fabric.num_nodes, fabric.replicas, -(-devices // 8))
        nodes = next((n for n in asked if n > 1 and devices % n == 0), 1)
        fabric = replace(fabric, devices=devices // nodes, num_nodes=nodes)
    elif fabric.processes is None:
        fabric = replace(fabric, devices=max(1, torch.cuda.device_count()) if device_type == "cuda" else 1)
    return replace(config, fabric=fabric)


def _room(device_type: str, gpu_gib: float | None, gpu: str | None, world: int) -> tuple[str, float | None]:
    """The device in words, and the bytes of it that a run may fill."""
    name, size, cuda = gpu or ("GPU" if device_type == "cuda" else "CPU"), gpu_gib and gpu_gib * GIB, device_type == "cuda"
    if size is None and not cuda:
        size = psutil.virtual_memory().available / world
    elif size is None and gpu is None and torch.cuda.is_available():
        name, size = torch.cuda.get_device_name(), float(torch.cuda.mem_get_info()[1])
    if size is None:
        return f"{name} of unknown size; give --gpu_gib", None
    room = (size - CUDA_CONTEXT) * (1 - WASTE["cuda"]) if cuda else size * (1 - WASTE["cpu"])
    return f"{name} of {size / GIB:.3g} GiB, of which {room / GIB:.3g} can be filled", room


def _refused(configured: FitConfig, config: FitConfig, here: bool) -> tuple[list[str], list[str]]:
    """Why `fit` would refuse a run, by its own checks, and notes: also what this machine lacks, unless the run is `here`."""
    refused, notes = list[str](), list[str]()
    machine = replace(config, fabric=configured.fabric) if here else config
    checks: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: check_resume(configured) if configured.run_folder else None, refused),
        (lambda: notes.extend(check_start(config)), refused),
        (lambda: check_machine(machine), refused if here else notes),
    ]
    for check, lines in checks:
        try:
            check()
        except UserError as error:
            lines.append(str(error))
    return refused, notes


def changed(config: Any, values: dict[str, Any]) -> Any:
    """A configuration with other values, given by dotted keys."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        config = replace(config, **{name: changed(getattr(config, name), {rest: value}) if rest else value})
    return config


def changes(config: FitConfig, most: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Values that may save memory, and what they cost, the least harmful first; fsdp on up to `most` devices."""
    rows, micro, asked = config.data.packing.rows, config.data.micro_batches, config.validation
    parts = 2 if rows % 2 == 0 else rows
    pieces = {"data.packing.rows": rows // parts, "data.micro_batches": micro * parts}
    yield {"objective.chunk": 1 << 22}, "nothing but more, smaller products"
    questions = max(1, min(asked.rows, asked.questions * len(asked.tasks)) // 4)
    yield {"validation.rows": questions}, "answers in smaller, less efficient pieces"
    yield pieces, "the same step in smaller, less efficient pieces"
    yield {"fabric.precision": "bf16-mixed"}, "rounded products; faster on a GPU"
    yield {"fabric.checkpointing": "selective"}, "norms, activations and the like computed twice"
    yield {"fabric.checkpointing": True}, "about a third more work"
    for n in [n for n in MANY if (config.fabric.processes or 1) <= n <= most]:
        spread = {"fabric.strategy": "fsdp", "fabric.devices": n}
        nodes = {"fabric.num_nodes": 1} if config.fabric.num_nodes > 1 else {}
        share = {"data.micro_batches": -(-micro // n) * n} if micro % n else {}
        yield {**spread, **nodes, **share}, f"{n} devices that exchange weights in every block"
    rounded = "small updates of the weights are lost" if config.lora is None else "weights below adapters are rounded"
    yield {"fabric.precision": "bf16-true"}, rounded


def savings(
    config: FitConfig, model: SpeechModel, start: float, most: int, cuda: bool, in_step: bool = False, limit: float = 0.0
) -> list[Knob]:
    """What each knob alone saves of `start`, the bytes of a step or of all, where that is a hundredth or more; fsdp on no more
    devices than `limit` asks for."""
    knobs, enough = list[Knob](), False
    for values, price in changes(config, most):
        spread = "fabric.devices" in values
        try:
            other = changed(config, values)
            total = estimate(other, model, cuda).needed(in_step)
        except UserError:  # such as Muon with fsdp, or micro-batches that a balance cannot split
            continue
        if total < 0.99 * start and not (spread and enough):
            keys = " ".join(f"--{key} {str(value).lower()}" for key, value in values.items())
            knobs.append(Knob(keys, price, other, total, start - total))
            enough = enough or (spread and total <= limit)
    return knobs


def savings_here(config: FitConfig, in_step: bool, limit: float) -> list[Knob]:
    """What keys save of a run on this machine, the most first and each key once; `config` is one with its alignment head."""
    device_type = kind_of(config)
    here, model = placed(config, None, device_type), meta_model(config, shape_of(config.model))
    most = max(here.fabric.processes or 1, torch.cuda.device_count() if device_type == "cuda" else 1)
    start = estimate(here, model, device_type == "cuda").needed(in_step)
    knobs = dict[str, Knob]()
    for knob in sorted(savings(here, model, start, most, device_type == "cuda", in_step, limit), key=lambda knob: -knob.saved):
        knobs.setdefault(knob.keys.split()[0], knob)
    return list(knobs.values())


def pace(config: FitConfig, model: SpeechModel, world: int, speed: float | None) -> dict[str, Any]:
    """The mean pace of the steps at `speed` FLOP/s of a device, of two micro-batches; of full rows where `problem` says why."""
    micro, examples, problem = config.data.micro_batches, None, ""
    try:
        initial = build_initial(config.model, config.seed, weights=False)
        tools = model.config, initial.tokenizer, initial.codec, config.objective.encoder_alone
        shard = PackerShard(build_pipeline(config.data, *tools), 0, 1)
        batches = [shard.batch() for _ in range(2)]
        examples = micro / 2 * sum(b.examples for b in batches)
    except (UserError, OSError) as error:
        batches, problem = [worst_batch(config.data, model.config)], str(error)
    forward, backward = 1.0, 1.0
    if config.balance is not None:
        forward, backward = config.balance.passes(config.data, config.objective.by_heads, len(model.layout), world)
    flops, each = StepFlops(model, config.objective), micro / len(batches)
    first, passes = config.objective.align_first, (forward + 2 * backward) / 3  # as `StepFlops` counts them
    work = each * sum(first * flops(b, targets(b), 0.0) + (1 - first) * passes * flops(b, targets(b)) for b in batches)
    seconds, budget = work / (speed * world) if speed else None, config.budget
    limits = [float(budget.steps)] if budget.steps is not None else []
    limits += [60 * budget.minutes / seconds] if budget.minutes is not None and seconds else []
    steps = min(limits, default=None)
    hours = steps * seconds / 3600 if steps and seconds else budget.minutes and budget.minutes / 60
    columns, ids = each * sum(b.positions for b in batches), each * sum(len(at) for b in batches for at in b.supervised)
    source = f"full rows, since the data cannot be read here ({problem})" if problem else "2 micro-batches of the data"
    figures = dict(columns=columns, targets=ids, examples=examples, flops=work, forwards=forward, backwards=backward)
    return {**figures, "seconds": seconds, "steps": steps, "hours": hours, "source": source, "problem": problem}


def show(plan: Plan, name: str) -> None:
    """Prints a plan; `name` is the run's, for the first title."""
    run, memory = plan.pace, plan.memory
    counts = {**plan.counts, "total": tuple(map(sum, zip(*plan.counts.values(), strict=True)))}
    rows = [(part, *(f"{n:,}" for n in both)) for part, both in counts.items()]
    print_table(f"{name}: parameters", ("", "all", "trainable"), rows)
    title = f"memory of the fullest batch on each of {plan.devices} device(s), {plan.strategy}; fullest at: {memory.phase}"
    parts = {**{part: size for part, size in memory.phases[memory.phase].items() if size}, "peak": memory.total}
    print_table(title, ("", "GiB"), [(part, f"{size / GIB:.3f}") for part, size in parts.items()])
    phases = {**memory.totals, "a checkpoint's copy on the host": memory.snapshot, "a checkpoint on disk": memory.disk}
    print_table("memory by phase", ("", "GiB"), [(phase, f"{size / GIB:.3f}") for phase, size in phases.items()])
    lines = {
        "tokens a step": f"{run['columns']:,.0f}",
        "targets a step": f"{run['targets']:,.0f}",
        "examples a step": run["examples"] and f"{run['examples']:,.1f}",
        "work a step": f"{run['flops'] / 1e12:.3g} TFLOP",
        "passes a step": f"{run['forwards']:g} forward, {run['backwards']:g} backward",
        "time a step": run["seconds"] and f"{run['seconds']:.3g} s",
        "steps to the budget": run["steps"] and f"{run['steps']:,.0f}",
        "time to the budget": run["hours"] and duration(3600 * run["hours"]),
        "tokens to the budget": run["steps"] and short(run["steps"] * run["columns"]),
    }
    print_table("pace", ("", ""), [(key, value or "unknown") for key, value in lines.items()])
    print(f"tokens, targets and examples: {run['source']}; a token is one time step of all streams")
    print("".join(f"note: {note}\n" for note in plan.notes), end="")
    print(f"device: {plan.device}" + {None: "", True: ": it fits", False: ": IT DOES NOT FIT"}[plan.fits])
    enough = [knob for knob in plan.knobs if plan.limit is not None and knob.total <= plan.limit]
    title = "what makes it fit" if enough else "what saves memory; none is enough alone: set one, and plan again"
    rows = [(knob.keys, f"{knob.total / GIB:.2f}", f"{knob.saved / GIB:.2f}", knob.price) for knob in enough or plan.knobs]
    if rows:
        print_table(title, ("", "GiB", "saves", "price"), rows)
