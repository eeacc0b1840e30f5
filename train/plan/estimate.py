"""Estimates the memory of a run on each device, from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torch import nn

from omni.config import ModelConfig
from omni.errors import UserError
from omni.model.speech_model import SpeechModel
from omni.recompute import Recompute
from train.config.run import FitConfig
from train.data.batching.loader import process_shards
from train.distributed.sharding import ParallelDims
from train.plan.balanced import micro_batches_of
from train.plan.parameters import meta_model
from train.plan.phases import COPY, OUTSIDE, STEADY, Outside
from train.plan.quantized import packed_bytes
from train.plan.trace import ANSWERS, Snapshot, trace
from train.plan.worst_batch import worst_batch

FEW = 2
"""Blocks that are traced of a deeper stack: each further block takes the difference between this many and one more."""

PERSISTENT = ("weights", "gradients", "optimizer", "average", "copies")

KEPT_SHARE = {False: 0.2, True: 1.15, "selective": 1.15}
"""Memory that glibc keeps in freed blocks as a process trains on a CPU, as a share of all that a step allocates and frees;
without checkpointing, and with it, where blocks are freed between ones that stay. Measured with nano at rows of 4 x 128,
10 x 256 and 16 x 512: 0.41, 0.19 and 0.14, with checkpointing 0.42, 1.46 and 1.00; selective is taken for the same. Blocks
above 32 MiB are always given back."""


@dataclass(frozen=True)
class Estimate:
    """Peak memory of a run on one device, and on its machine.

    Attributes:
        phases: bytes of a device by phase of the run and part; see `train.plan.trace.PARTS`. Besides, `copies` of weights,
            `communication` (the buffers of gradients and gathered weights that processes exchange), and `snapshot` (a
            checkpoint's copy of the state), which the peak does not count: a run without room for it does without.
        host, files: see `train.plan.phases.Outside`.
    """

    phases: dict[str, Snapshot]
    host: dict[str, float]
    files: dict[str, float]

    @property
    def phase(self) -> str:
        """The phase in which the peak is."""
        return max(self.totals, key=self._needed)

    @property
    def parts(self) -> Snapshot:
        """Bytes by part at the peak."""
        return self.phases[self.phase]

    @property
    def totals(self) -> dict[str, float]:
        """Bytes of a device by phase."""
        return {name: sum(parts.values()) for name, parts in self.phases.items()}

    @property
    def total(self) -> float:
        """Bytes of a device at the peak."""
        return self._needed(self.phase)

    def _needed(self, phase: str) -> float:
        return self.totals[phase] - self.phases[phase].get(COPY, 0.0)

    @property
    def step(self) -> float:
        """Bytes of a device at the peak of a step."""
        return max(size for name, size in self.totals.items() if name not in OUTSIDE)

    def kept(self, checkpointing: Recompute) -> float:
        """Estimates the bytes that a process on a CPU holds besides: freed blocks that the C library (glibc) keeps."""
        return KEPT_SHARE[checkpointing] * sum(size for part, size in self.parts.items() if part not in PERSISTENT)


def devices_of(config: FitConfig) -> int:
    """Processes of a run over all nodes; UserError where they are left open."""
    devices = config.fabric.devices
    if isinstance(devices, str):
        listed = [part for part in devices.split(",") if part.strip().isdigit()]
        if not listed:
            raise UserError(f"fabric.devices is {devices!r}, which depends on the machine; give --devices N")
        devices = len(listed) if len(listed) > 1 or devices.endswith(",") else int(listed[0])
    world = devices * config.fabric.num_nodes
    if world < 1:
        raise UserError(f"fabric.devices is {config.fabric.devices} on {config.fabric.num_nodes} nodes; give --devices N")
    return world


def estimate(config: FitConfig, shape: ModelConfig, cuda: bool = False) -> Estimate:
    """Estimates the memory of a run of worst batches on each device, under the configuration's strategy and precision.

    Raises:
        UserError: settings that do not fit each other, such as Muon with fsdp, or micro-batches that processes cannot share.
    """
    world = devices_of(config)
    strategy = config.fabric.strategy
    rules = {config.optimizer.name, *(group.rule for group in config.optimizer.groups)}
    if strategy == "fsdp" and "muon" in rules:
        raise UserError("optimizer muon with fabric.strategy fsdp: use optimizer.name adamw, or strategy ddp")
    dims = ParallelDims.of(config.fabric, world)
    process_shards(config.data.micro_batches, 0, dims.data)
    phases = phases_of(config, shape, config.data.micro_batches // dims.data, cuda)
    model = meta_model(config, shape)
    if world > 1 or strategy == "fsdp":
        share = sharded if strategy == "fsdp" else replicated
        size, learning = bytes_each(config)
        count, half = dims.shards * dims.tensor, config.fabric.precision == "bf16-mixed"
        phases = {name: share(name, parts, model, count, (size, learning, half)) for name, parts in phases.items()}
    steady = {part: size * (part in STEADY) for part, size in phases["optimizer"].items()}
    around = Outside(config, shape, model, steady, world, cuda)
    return Estimate(around.phases(phases), around.host(), around.files())


def bytes_each(config: FitConfig) -> tuple[int, int]:
    """Bytes of a frozen value, and of a trainable one (see `train.distributed.precision.AdapterPrecision`)."""
    size = 2 if config.fabric.precision == "bf16-true" else 4
    return size, size if config.lora is None else 4


def phases_of(config: FitConfig, shape: ModelConfig, micro_batches: int, cuda: bool) -> dict[str, Snapshot]:
    """Bytes by phase and part of one process that trains alone. Deep stacks are traced with few blocks and extrapolated: every
    phase is linear in the number of blocks. Results are cached: knobs need the same ones again."""
    alone = replace(
        config,
        run_folder="",
        fabric=replace(config.fabric, strategy="auto", replicas=1, tensor_parallel=1, devices=1, num_nodes=1),
        data=replace(config.data, micro_batches=micro_batches_of(config, micro_batches)),
    )
    return _phases_of(_TraceKey(repr((alone, shape, cuda)), alone, shape, cuda))


@dataclass(frozen=True)
class _TraceKey:
    """The arguments of a trace as a key; equal where its text is (a configuration holds mappings, which cannot be hashed)."""

    text: str
    config: FitConfig = field(compare=False)
    shape: ModelConfig = field(compare=False)
    cuda: bool = field(compare=False)


@lru_cache(maxsize=128)
def _phases_of(question: _TraceKey) -> dict[str, Snapshot]:
    config, shape, cuda = question.config, question.shape, question.cuda
    micro_batches = config.data.micro_batches
    batch = worst_batch(config.data, shape)

    def at(decoder: int, encoder: int) -> dict[str, Snapshot]:
        shallow = replace(shape, decoder=replace(shape.decoder, layers=decoder), encoder=shape.encoder.with_layers(encoder))
        return trace(config, shallow, batch, micro_batches, cuda)

    wanted = shape.decoder.layers, shape.encoder.layers
    few = min(FEW, wanted[0]), min(FEW, wanted[1])
    base = at(*few)
    steps = []
    if wanted[0] > few[0]:
        steps.append((wanted[0] - few[0], at(few[0] + 1, few[1])))
    if wanted[1] > few[1]:
        steps.append((wanted[1] - few[1], at(few[0], few[1] + 1)))
    return {
        phase: {
            part: max(0.0, value + sum(more * (longer[phase][part] - value) for more, longer in steps))
            for part, value in parts.items()
        }
        for phase, parts in base.items()
    }


# --- what processes share -----------------------------------------------------------------------------------------------


def replicated(
    phase: str, parts: Mapping[str, float], model: SpeechModel, world: int, sizes: tuple[int, int, bool]
) -> Snapshot:
    """DDP: every process holds everything, and its gradients once more in the buckets that are exchanged."""
    return {**parts, "communication": float(sum(p.numel() for p in model.parameters() if p.requires_grad) * sizes[1])}


def sharded(phase: str, parts: Mapping[str, float], model: SpeechModel, world: int, sizes: tuple[int, int, bool]) -> Snapshot:
    """FSDP2 as `train.distributed.sharding.shard` sets it up: weights, gradients, optimizer and average in equal parts, but
    quantised weights whole in every process.

    Beside its part a process holds gathered weights: of the root (tables, heads, convolutions, projector), which are not freed
    after its forward pass, and of two blocks, the current one and the next. During the backward pass it also holds the root's
    gradients and one block's whole.

    Args:
        sizes: bytes of a frozen value, and of a trainable one, and whether they are gathered in half precision.
    """
    size, learning, half = sizes
    blocks = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]

    def gathered(part: nn.Module) -> int:
        floating = [p for p in part.parameters() if p.is_floating_point()]
        return sum(p.numel() * (2 if half else learning if p.requires_grad else size) for p in floating)

    def gradients(part: nn.Module) -> int:
        return sum(p.numel() * learning for p in part.parameters() if p.requires_grad)

    each = [gathered(block) for block in blocks]
    root, largest = gathered(model) - sum(each), max(each)
    extra = 0.0
    if phase not in ("optimizer", "average", "balance", ANSWERS):
        extra = float(root + min(2 * largest, sum(each)))
    if phase.startswith("backward"):
        found = [gradients(block) for block in blocks]
        extra += gradients(model) - sum(found) + max(found)
    out = dict(parts)
    shared = ["weights", "gradients", "optimizer", "average", "balance"]
    for part in shared + ["working"] * (phase in ("optimizer", "average")):
        out[part] = parts[part] / world
    packed = packed_bytes(model)
    out["weights"] += packed * (1 - 1 / world)
    return {**out, "communication": extra if world > 1 else 0.0}
