"""Plans a run before it is started (`omni-train plan`): parameters, memory on each device, and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import psutil
import torch

from omni.config import ModelConfig
from omni.errors import UserError
from omni.hardware import peak_flops
from train.config.run import FitConfig
from train.config.sections import FabricConfig
from train.data.batching.batch import Batch
from train.distributed.fabric import build_fabric
from train.distributed.sharding import ParallelDims
from train.plan.estimate import Estimate, bytes_each, devices_of, estimate
from train.plan.knobs import KnobEffect, savings, try_knobs
from train.plan.network import Traffic, traffic
from train.plan.options import check_options
from train.plan.pace import Pace, flops_of, pace, sample
from train.plan.parameters import Count, count_parameters, meta_model
from train.plan.phases import workers_bytes
from train.plan.reading import advise
from train.plan.streaming import advise_streams
from train.plan.trial import KEPT, RETURNED, Attempt, attempt
from train.plan.worst_batch import worst_batch
from train.trainer.initial_model import shape_of
from train.trainer.preflight import check_devices, check_packages, check_resume, check_start, check_workers

GIB = float(1 << 30)

CUDA_CONTEXT, CUDA_WASTE = 0.6 * GIB, 0.05
"""Memory of a GPU that a run cannot use: bytes of the driver's context and libraries, and the share that the caching allocator
loses to blocks of the wrong size."""

DEVICES_A_NODE = 8
"""Devices of a machine, where more are planned for."""
CPU_WASTE = 0.25
"""Share of a CPU's memory that is left to the C library, which keeps freed blocks (measured at 11 to 30 % over what is in use
without checkpointing; with it at 35 % to twice what is in use, in small models)."""

MAC = "a Mac's GPU (mps, estimated as a CPU's step is, without what its allocator keeps)"

Place = Literal["cpu", "mps", "cuda"]
"""Kinds of devices that a run computes on."""


@dataclass(frozen=True)
class Plan:
    """A run's parameters, memory and pace, and the knobs with which it fits.

    Attributes:
        limit: bytes of a device that the run may fill; None where the device is not known.
        host_limit: bytes of this machine's memory that are free; None where the device is a CPU, or not here.
        device: in words.
        process: bytes that Python and its libraries take in each process of the machine; no part of the estimate.
        workers: bytes of a machine's data workers, with the batches that they make ahead.
        traffic: what each process sends in a step; None for one process.
        kept: bytes that its C library keeps besides, about: freed blocks that it cannot use again; 0 on a GPU.
        attempts: measurements on this machine, by the way in which memory was measured.
        untried: why there are none.
        reading: a line for each source that reads files: how long it takes, and the order or the preparation that is advised.
        knobs: each alone; row: applied one after another.
        refused: why `fit` would refuse the run besides; notes: what this machine lacks for a run of another one.
    """

    counts: list[Count]
    estimate: Estimate
    strategy: str
    world: int
    nodes: int
    device: str
    limit: float | None
    host_limit: float | None
    process: float
    workers: float
    kept: float
    pace: Pace
    traffic: Traffic | None
    attempts: dict[str, Attempt]
    untried: str
    reading: list[str]
    knobs: list[KnobEffect]
    row: list[KnobEffect]
    refused: list[str]
    notes: list[str]

    @property
    def fits(self) -> bool | None:
        return None if self.limit is None else self.estimate.total <= self.limit

    @property
    def local(self) -> int:
        """Processes on one machine."""
        return self.world // self.nodes

    @property
    def problems(self) -> list[str]:
        """Why the run cannot be: one line each."""
        short = f"{self.estimate.phase} needs {self.estimate.total / GIB:.2f} GiB on each device"
        host = max(self.estimate.host.values(), default=0.0) + self.local * self.process + self.workers
        found = []
        if self.limit is not None and not self.fits:
            found.append(f"the run does not fit: {short}, of which {self.limit / GIB:.2f} GiB can be filled")
        if self.host_limit is not None and host > self.host_limit:
            found.append(
                f"the run needs {host / GIB:.2f} GiB of the host's memory, of which {self.host_limit / GIB:.2f} GiB are free"
            )
        return [*found, *self.refused]


def make_plan(
    config: FitConfig,
    devices: int | None = None,
    gpu_gib: float | None = None,
    gpu: str | None = None,
    mfu: float = 0.35,
    attempted: bool = False,
) -> Plan:
    """Plans a run; for the arguments see `train.commands.plan.HELP`.

    Raises:
        UserError: whatever is wrong with the configuration or the arguments.
    """
    from train.trainer.build import with_alignment

    check_options(devices, gpu_gib, mfu)
    speed = flops_of(gpu) if gpu is not None else None
    given, config = config, with_alignment(config)
    shape = shape_of(config.model)
    place = place_of(config, gpu_gib is not None or gpu is not None)
    cuda = place == "cuda"
    config = _placed(config, devices, cuda)
    world, here = devices_of(config), cuda and torch.cuda.is_available()
    config, larger = config.shared_by(ParallelDims.of(config.fabric, world).data)
    words, limit = _room(place, gpu_gib, gpu, world)
    model = meta_model(config, shape)
    whole = estimate(config, shape, cuda)
    attempts, untried = _try(config, shape, whole, world, limit, place, here) if attempted else ({}, "")
    if speed is None and here:
        speed = peak_flops(torch.device("cuda"))
    measured = list(attempts.values())[-1].seconds if attempts else None  # the one with memory as a run has it
    mine = (here or place == "cpu" or torch.backends.mps.is_available()) and devices is None and gpu_gib is None and gpu is None
    refused, notes = _refused(given, config, mine)
    notes += [larger] if larger is not None else []
    nodes = config.fabric.num_nodes
    if devices is not None and nodes > 1:
        notes.append(f"planned as {nodes} machines of {world // nodes} devices each; for others give --fabric.num_nodes")
    batch = worst_batch(config.data, shape)
    found: tuple[list[Batch], str]
    try:
        found = sample(config, shape)
    except (UserError, OSError) as error:
        found = [], f"full rows, since the data cannot be read here ({error})"
        refused = refused or [str(error)]
    run = pace(config, model, found, batch, world, measured, speed, mfu)
    short = limit is not None and whole.total > limit
    knobs, row = try_knobs(config, shape, limit, cuda) if short and limit is not None else ([], [])
    strategy: str = config.fabric.strategy
    if strategy == "auto":
        strategy = "ddp" if world > 1 else "one process"
    return Plan(
        counts=count_parameters(model),
        estimate=whole,
        strategy=strategy,
        world=world,
        nodes=config.fabric.num_nodes,
        device=words,
        limit=limit,
        host_limit=float(psutil.virtual_memory().available) if here and mine else None,
        process=float(psutil.Process().memory_info().rss),
        workers=workers_bytes(config, shape, world),
        kept=whole.kept(config.fabric.checkpointing) if place == "cpu" else 0.0,
        pace=run,
        traffic=traffic(config, model, ParallelDims.of(config.fabric, world), *bytes_each(config)) if world > 1 else None,
        attempts=attempts,
        untried=untried,
        reading=[
            *advise(config.data, config.objective.encoder_alone),
            *advise_streams(config, shape, run.examples, run.seconds, world),
        ]
        if found[0]
        else [],
        knobs=knobs,
        row=row,
        refused=refused,
        notes=notes,
    )


def savings_here(config: FitConfig, in_step: bool) -> list[KnobEffect]:
    """Estimates what each knob saves of a run on this machine; see `train.plan.knobs.savings`.

    Args:
        config: with its alignment head (`train.trainer.build.with_alignment`).
    """
    cuda = place_of(config, False) == "cuda"
    placed = _placed(config, None, cuda)
    devices = max(devices_of(placed), torch.cuda.device_count() if cuda else 1)
    return savings(placed, shape_of(config.model), devices, cuda, in_step)


def _refused(given: FitConfig, config: FitConfig, here: bool) -> tuple[list[str], list[str]]:
    """Why `fit` would refuse a run, by its own checks, and notes; what a machine must have is a note unless the run is `here`.

    Args:
        given: the configuration as it was given; config: with its alignment head and the plan's devices.
    """
    refused, notes = list[str](), list[str]()
    lacking = refused if here else notes
    checks: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: check_resume(given) if given.run_folder else None, refused),
        (lambda: notes.extend(check_start(config)), refused),
        (lambda: check_devices((given if here else config).fabric), lacking),
        (lambda: check_packages(config), lacking),
        (lambda: check_workers(config), lacking),
        (lambda: build_fabric(given.fabric) if here and not lacking else None, lacking),
    ]
    for check, lines in checks:
        try:
            check()
        except UserError as error:
            lines.append(str(error))
    return refused, notes


def place_of(config: FitConfig, described: bool) -> Place:
    """The kind of device of a run: as configured, else what this machine has; one `described` by size or name is a GPU."""
    asked, cuda = config.fabric.accelerator, torch.cuda.is_available()
    mac = asked in ("auto", "gpu") and not described and not cuda and torch.backends.mps.is_available()
    if asked == "mps" or mac:
        return "mps"
    return "cuda" if described or asked in ("gpu", "cuda") or (asked == "auto" and cuda) else "cpu"


def _placed(config: FitConfig, devices: int | None, cuda: bool) -> FitConfig:
    """Sets the configuration's number of devices where it is given or left open."""
    fabric = config.fabric
    if devices is not None:
        nodes = nodes_of(fabric, devices)
        fabric = replace(fabric, devices=devices // nodes, num_nodes=nodes)
    elif fabric.devices in ("auto", -1, "-1"):
        fabric = replace(fabric, devices=max(1, torch.cuda.device_count()) if cuda else 1)
    return replace(config, fabric=fabric)


def nodes_of(fabric: FabricConfig, devices: int) -> int:
    """Machines of so many devices: as configured, one for each replica, or those of eight devices where there are more."""
    asked = [fabric.num_nodes, fabric.replicas, -(-devices // DEVICES_A_NODE)]
    return next((nodes for nodes in asked if nodes > 1 and devices % nodes == 0), 1)


def _room(place: Place, gpu_gib: float | None, gpu: str | None, world: int) -> tuple[str, float | None]:
    """The device in words, and the bytes of it that a run may fill."""
    size = gpu_gib * GIB if gpu_gib is not None else None
    if place == "cpu" or (place == "mps" and size is None and torch.backends.mps.is_available()):
        size = psutil.virtual_memory().available / world
        room = size * (1 - CPU_WASTE)
        name = "CPU" if place == "cpu" else MAC
        return f"{name} with {size / GIB:.1f} GiB free for each process, of which {room / GIB:.1f} can be filled", room
    name = MAC if place == "mps" else gpu or "GPU"
    if place == "cuda" and size is None and gpu is None and torch.cuda.is_available():
        name, size = torch.cuda.get_device_name(), float(torch.cuda.mem_get_info()[1])
    if size is None:
        return f"{name} of unknown size; give --gpu_gib", None
    room = (size - CUDA_CONTEXT) * (1 - CUDA_WASTE) if place == "cuda" else size * (1 - CPU_WASTE)
    return f"{name} of {size / GIB:.3g} GiB, of which {room / GIB:.3g} can be filled", room


def _try(
    config: FitConfig, shape: ModelConfig, whole: Estimate, world: int, limit: float | None, place: Place, here: bool
) -> tuple[dict[str, Attempt], str]:
    """Measures steps on this machine; returns the measurements, or none and the reason."""
    if place == "mps":
        return {}, "what a step holds on mps cannot be measured"
    if place == "cuda" and not here:
        return {}, "this machine has no GPU that PyTorch can use"
    if world > 1 or config.fabric.strategy == "fsdp":
        return {}, f"{world} processes with strategy {config.fabric.strategy} cannot be tried in one"
    if limit is not None and whole.total > limit:
        return {}, f"the estimate of {whole.total / GIB:.2f} GiB is more than the {limit / GIB:.2f} GiB that there are"
    micro = config.data.micro_batches
    if place == "cuda":
        return {"by CUDA's counters": attempt(config, shape, micro, "cuda")}, ""
    return {
        RETURNED: attempt(config, shape, micro, "cpu"),
        KEPT: attempt(config, shape, micro, "cpu", keep_freed=True),
    }, ""


def plain(plan: Plan) -> dict[str, Any]:
    """The plan as plain data; memory in bytes."""

    def turned(one: KnobEffect) -> dict[str, Any]:
        return {"keys": one.knob.keys, "price": one.knob.price, "bytes": one.total, "saved": one.saved, "fits": one.fits}

    return {
        "parameters": [asdict(count) for count in plan.counts],
        "memory": {
            "parts": plan.estimate.parts,
            "total": plan.estimate.total,
            "phase": plan.estimate.phase,
            "phases": plan.estimate.totals,
            "host": plan.estimate.host,
            "files": plan.estimate.files,
            "workers": plan.workers,
        },
        "strategy": plan.strategy,
        "devices": plan.world,
        "device": plan.device,
        "limit": plan.limit,
        "fits": plan.fits,
        "process": plan.process,
        "kept": plan.kept,
        "measured": {how: asdict(one) for how, one in plan.attempts.items()},
        "not_measured": plan.untried,
        "reading": plan.reading,
        "pace": asdict(plan.pace),
        "network": None if plan.traffic is None else asdict(plan.traffic),
        "to_budget": {"tokens": plan.pace.to_budget(plan.pace.columns), "targets": plan.pace.to_budget(plan.pace.targets)},
        "knobs": [turned(one) for one in plan.knobs],
        "together": [turned(one) for one in plan.row],
        "problems": plan.problems,
        "notes": plan.notes,
    }
