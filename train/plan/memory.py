"""Memory of a run on each device, by arithmetic from the shapes of its model and of its fullest batch, as the operators of a
step keep it.

Dimensions of what is counted: columns of a micro-batch, frames that the encoder computes; sizes are in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from omni.audio.io import SAMPLE_RATE
from omni.codec.registry import CODECS
from omni.config import ModelConfig
from omni.generate.options import AnswerOptions
from omni.layout import IGNORE
from omni.lora.attach import adapted, add_adapter
from omni.model.linears import chosen_linears
from omni.model.speech_model import SpeechModel, Unfilled
from omni.tasks import TASKS, find_task
from train.balance.config import balanced_tasks
from train.config.run import FitConfig
from train.data.batching.batch import Batch
from train.data.batching.loader import process_shards
from train.data.config import DataConfig, tasks_of
from train.distributed.fabric import product_type
from train.distributed.sharding import ParallelDims
from train.optim.optimizer import parameter_groups, set_trainable
from train.trainer.validation import answering_type

Parts = dict[str, float]
STATE = {"adamw": (2.0, 0.0), "muon": (1.0, 0.0), "paged_adamw_8bit": (0.0, 2 + 8 / 256)}
"""State of a rule by value: values of its type, and bytes (two moments in 8 bits, with a scale in fp32 for 256 values)."""
CHUNK = 512
"""Columns of a question that are fed at once (`omni.generate.runner`)."""
START, ANSWERS = "start", "validation's answers"
"""Phases that are no part of a step."""
PROMPT = 4
"""Columns of a spoken question's example beside the question itself: input, end, the marker, and one of the answer."""

PADDED_COLUMNS = 256
"""Columns of an example where every clip costs the encoder its whole window, however short (`EncoderConfig.fixed_length`)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a run on one device.

    Attributes:
        phases: by phase and part.
        snapshot: of a checkpoint's copy in the host's memory, beside the steps; no part of the peak. disk: of a checkpoint.
        uncounted: what is not counted; "" where all is.
    """

    phases: dict[str, Parts]
    snapshot: float
    disk: float
    uncounted: str

    @property
    def totals(self) -> Parts:
        return {name: sum(parts.values()) for name, parts in self.phases.items()}

    @property
    def phase(self) -> str:
        """The phase in which the peak is."""
        return max(self.totals, key=self.totals.__getitem__)

    @property
    def total(self) -> float:
        return self.totals[self.phase]

    def needed(self, in_step: bool) -> float:
        """Bytes of the peak, or of that of a step."""
        return max(size for name, size in self.totals.items() if not in_step or name not in (START, ANSWERS))


def worst_batch(data: DataConfig, shape: ModelConfig) -> Batch:
    """A batch that no batch of the run exceeds: all rows full, every stream that any task of the mixture trains supervised in
    every column, and, where any task asks by speech, clips as long as the window and the rows have room for.

    Columns of data belong to a sound or to an answer, these to both: answers cost little beside the decoder's columns, since
    logits are made in chunks. Where clips have a fixed length there is one to `PADDED_COLUMNS` columns.
    """
    rows, length, layout, tasks = data.packing.rows, data.packing.length, shape.layout, tasks_of(data)
    trained = torch.tensor([any(t.trained(layout)[k] for t in tasks) for k in range(len(layout))])
    tokens = layout.ids("pad")[None, :, None].repeat(rows, 1, length)
    targets = torch.where(trained[None, :, None], torch.zeros_like(tokens), torch.full_like(tokens, IGNORE))
    heard = clips_of(length, shape) if any(task.question == "audio" for task in tasks) else []
    index, segments = torch.full((rows, length), -1), torch.zeros(rows, length, dtype=torch.long)
    start, offsets = 0, sum(heard) * torch.arange(rows)[:, None]
    for number, count in enumerate(heard):
        index[:, start + 1 : start + 1 + count] = offsets + sum(heard[:number]) + torch.arange(count)
        segments[:, start:] = number
        start += count + PROMPT
    frames = [min(count * shape.projector.stack, shape.encoder.positions) for count in heard] * rows
    lengths = [shape.encoder.feature_frames(n) for n in frames]
    transcripts: list[list[int]] = [[] for _ in frames]
    ids = layout.text.size + 1 if shape.ctc == "tokens" else shape.ctc
    if ids > 1 and data.alignment != "none":
        spellings = (1, ids - 1), (ids + 1, shape.ctc_sounds - 1)  # of each the first id, and the number of ids
        transcripts = [[first + i % ids for first, ids in spellings if ids > 0 for i in range(max(1, n // 4))] for n in frames]
    return Batch(
        tokens=tokens,
        targets=targets,
        feature_index=index,
        segments=segments,
        task=torch.full((rows, length), list(TASKS).index(tasks[-1].name)),
        inputs=torch.zeros(len(frames), shape.encoder.bands, max(lengths, default=0)),
        input_lengths=lengths,
        frames=frames,
        transcripts=transcripts,
        examples=rows * max(1, len(heard)),
        positions=rows * length,
        state={},
    )


def clips_of(length: int, shape: ModelConfig) -> list[int]:
    """Number of features of each clip of a full row."""
    longest = math.ceil(shape.encoder.positions / shape.projector.stack)
    each = min(longest + PROMPT, PADDED_COLUMNS if shape.encoder.fixed_length else length, length)
    whole, rest = divmod(length, each)
    columns = [each] * whole + ([rest] if rest > PROMPT else [])
    return [max(1, n - PROMPT) for n in columns if n > PROMPT]


def meta_model(config: FitConfig, shape: ModelConfig) -> SpeechModel:
    """Builds the model with its adapters on the meta device, nothing quantised; the trainable parameters are marked."""
    with Unfilled():
        model = SpeechModel(shape)
    if config.lora is not None:
        add_adapter(model, config.lora)
    set_trainable(model, config.trainable_patterns)
    return model


def learning(part: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in part.named_parameters() if p.requires_grad]


def count(tensors: Iterable[Any]) -> int:
    return sum(t.numel() for t in tensors)


def bytes_each(config: FitConfig) -> tuple[int, int]:
    """Bytes of a frozen value, and of a trainable one (see `train.distributed.fabric.AdapterPrecision`)."""
    size = 2 if config.fabric.precision == "bf16-true" else 4
    return size, size if config.lora is None else 4


def packed_bytes(config: FitConfig, model: nn.Module) -> dict[str, int]:
    """Bytes of each quantised weight as bitsandbytes holds it: nf4 has a scale in 8 bits for 64 weights, one in fp32 for 256 of
    these, and two tables (Dettmers et al. 2023, section 3); int8 with a scale for each row."""
    sizes = {}
    quantize = config.lora.quantize if config.lora is not None else None
    for name in chosen_linears(model, config.lora.quantize_targets) if config.lora is not None and quantize else ():
        weight: Any = model.get_submodule(name).weight
        blocks = -(-weight.numel() // 64)
        nf4 = -(-weight.numel() // 2) + blocks + 4 * -(-blocks // 256) + 4 * (1 + 16 + 256)
        sizes[f"{name}.weight"] = nf4 if quantize == "nf4" else weight.numel() + 4 * len(weight)
    return sizes


def held(config: FitConfig, model: SpeechModel, packed: dict[str, int]) -> Parts:
    """Weights, gradients, optimizer's state and running average of one process that trains alone."""
    (frozen, trained), own = bytes_each(config), learning(model)
    n, state = count(p for _, p in own), 0.0
    for group in parameter_groups(own, config.optimizer):
        values, beside = STATE[group["rule"]]
        state += (values * trained + beside) * count(group["params"])
    weights = sum(packed.get(name, frozen * p.numel()) for name, p in model.named_parameters() if not p.requires_grad)
    weights += frozen * count(model.buffers()) + trained * n
    heard = [p for name, p in model.encoder.named_parameters() if ".lora." not in name]
    weights += 4 * count(heard) * (config.objective.distill_weight > 0 and any(p.requires_grad for p in heard))  # the teacher
    return {"weights": weights, "gradients": trained * n, "optimizer": state, "average": 4.0 * n * (config.ema is not None)}


class Activations:
    """Bytes that the passes of one micro-batch hold, most of them kept by blocks for the backward pass.

    Attributes:
        mixed: products are taken in half precision under autocast, which copies weights, and an input for each linear.
        answer: bytes of a value of the model that answers in a validation.
        p, r, out: bytes of a value of a product, of the stream between blocks, and of a block's linears' outputs.
    """

    def __init__(self, config: FitConfig, model: SpeechModel, cuda: bool) -> None:
        self.config, self.shape, self.model, self.cuda = config, model.config, model, cuda
        self.again, self.compiled = config.fabric.checkpointing, config.fabric.compile and cuda
        self.mixed = product_type(config.fabric.precision, config.lora is not None) is not None
        self.quantize = config.lora.quantize if config.lora is not None else None
        self.r = 2 if config.fabric.precision == "bf16-true" and not (self.mixed and self.quantize) else 4
        self.p = 2 if self.mixed else self.r
        self.answer = torch.finfo(answering_type("cuda" if cuda else "cpu", config.fabric.precision)).bits // 8
        self.out = self.r if self.quantize else self.p  # bitsandbytes gives what it was given: a norm's fp32
        self.batch, encoder, decoder = worst_batch(config.data, model.config), model.config.encoder, model.decoder
        self.columns = self.batch.tokens[:, 0].numel() * (not config.objective.encoder_alone)
        self.frames = len(self.batch.frames) * encoder.positions if encoder.fixed_length else sum(self.batch.frames)
        self.hears = bool(learning(model.encoder))
        self.heard = self.hears or bool(learning(model.projector))
        tables = (decoder.text_embedding, decoder.audio_embedding)
        self.flows = self.heard or any(map(learning, (*tables, decoder.blocks)))

    def _copies(self, *linears: nn.Module) -> int:
        """Copies that linears keep of an input that they share: autocast makes one for each that learns."""
        own = sum(bool(learning(linear)) for linear in linears)
        return own if self.mixed and not self.compiled else min(1, own)

    def block(self) -> tuple[float, float]:
        """Bytes a column of a decoder's block: all that it keeps, and what it keeps with selective checkpointing."""
        p, out, c, block = self.p, self.out, self.shape.decoder, cast(Any, self.model.decoder.blocks[0])
        attention, mlp, q, kv = block.attention, block.mlp, c.heads * c.head_size, c.kv_heads * c.head_size
        both, precise = 2 * (q + kv), p == 2 and not self.cuda  # a CPU computes attention in fp32
        scaled = 4 + 4 * bool(learning(block.mlp_norm))  # a CPU's norm keeps what it scales, a fused one its input alone
        norms = 2 * c.width * (self.r if self.cuda else scaled)
        if c.qk_norm:
            norms += (q + kv) * ((4 if self.mixed else p) if self.cuda else scaled)
        inputs = self._copies(attention.q, attention.k, attention.v) + self._copies(mlp.gate, mlp.up)
        attended = both * (4 if precise else out) + 4 * c.heads + precise * (p * q + 6 * self.batch.tokens.shape[2])
        if self.cuda and p == 4:
            attended += 2 * p * (q - kv)  # under a mask, keys and values are copied for each head
        inner = c.mlp_width * (out * (2 + (not self.compiled)) + p * self._copies(mlp.down))
        pairs = [part.pairs[name] for part in adapted(block).values() for name in part.active.names if name in part.pairs]
        low = p * sum(2 * len(pair.a) for pair in pairs)
        products = p * (both + 2 * c.width + 2 * c.mlp_width + sum(len(pair.b) for pair in pairs)) + 4 * c.heads + low
        return norms + p * c.width * inputs + attended + inner + low, self.r * c.width + products

    def stacks(self) -> list[tuple[float, float]]:
        """Bytes that the blocks of decoder and encoder keep, and those of one of them that is computed again."""
        c, e, sizes = self.shape.decoder, self.shape.encoder, []
        coded = self.out * (2 * c.width + c.heads * c.head_size + c.mlp_width) * (self.quantize == "int8")  # never dropped
        decoder = c.layers + c.post_layers, self.columns * self.flows, c.width, self.block(), coded
        heard = e.width * (2 * self.r + self.p * (16 if self.mixed else 14)), e.width * (self.r + 10 * self.p)
        encoder = e.layers, self.frames * self.hears, e.width, heard, 0  # its MLP is four times as wide
        for layers, size, width, (whole, selective), always in (decoder, encoder):
            kept = {False: whole, "selective": selective, True: self.r * width}[self.again]
            sizes.append((float(layers * size * (kept + always)), (whole - kept) * size))
        return sizes

    def around(self) -> float:
        """Bytes that are kept around the blocks: by convolutions, projector, embeddings, last norm, mask, encoder heads."""
        c, e, p, projector = self.shape.decoder, self.shape.encoder, self.p, self.model.projector
        linears = [part for part in projector.modules() if isinstance(part, nn.Linear)]
        projected = 1.2 * p * sum(part.in_features * bool(learning(part)) + part.out_features for part in linears)
        frame = p * (3 * e.width + 640) * self.hears + self.r * e.width + 12 * self.shape.ctc_ids
        packs = self.cuda and p == 2 and c.head_size % 8 == 0 and c.head_size <= 256
        column = c.width * self.r * (2 if self.cuda else 4) + 8 * len(self.shape.layout)
        column += 0 if packs else self.r * self.batch.tokens.shape[2]
        return self.columns * column + self.frames * (frame + projected / self.shape.projector.stack * self.heard)

    def copies(self) -> float:
        """Bytes of weights in half precision, which autocast keeps for the backward pass."""
        if not self.mixed:
            return 0.0
        model, coded = self.model, self.quantize is not None
        decoder = self.flows and not self.compiled and not coded and self.columns > 0
        parts = ((model.encoder, self.hears), (model.projector, self.heard), (model.decoder.blocks, decoder))
        weights = [w for part, kept in parts if kept for w in part.parameters() if w.ndim > 1]
        return 2.0 * count(w for w in weights if w.requires_grad or self.again is not True)

    def heads(self) -> tuple[float, float]:
        """Bytes of the heads' gradients, and of what their losses take beside: a chunk of logits, a weight, hidden states."""
        decoder, c, half = self.model.decoder, self.shape.decoder, self.p == 2
        if not self.columns:
            return 0.0, 0.0
        kept, sizes = 4 if half else self.r, [s.vocabulary for s in self.shape.layout.streams]
        sizes = [size for size, at in zip(sizes, self.batch.supervised, strict=True) if len(at)]
        largest, chunk = max(sizes, default=0), self.config.objective.chunk_on(self.cuda)
        logits = max((min(max(chunk, size), self.columns * size) for size in sizes), default=0)
        hidden = self.columns * c.width * (1 + (c.post_layers > 0)) * (self.r + kept)
        weights = [cast(nn.Parameter, w) for w in (decoder.text_weight, decoder.audio_weight)]
        copied = c.width * largest * (2 * self.mixed + 6 * (half and not self.cuda))
        gradients = float(kept * count(w for w in weights if w.requires_grad))
        return gradients, logits * (8 if half and not self.compiled else 4) + copied + hidden

    def backward(self) -> tuple[float, float]:
        """Bytes that the backward pass takes for a while in a block of decoder and of encoder, beside what is kept."""
        c, e, blocks = self.shape.decoder, self.shape.encoder, self.model.decoder.blocks
        dense = self.p * max(w.numel() for w in blocks[0].parameters()) * (self.quantize is not None)
        column = 3 * self.out * c.mlp_width + self.r * c.width
        return self.columns * column * self.flows + dense, self.frames * e.width * (5 * self.p + self.r) * self.hears

    def answers(self) -> float:
        """Bytes of a validation's answers at their first time step: the cache, and what hearing or feeding questions takes."""
        plan, shape, c = self.config.validation, self.shape, self.shape.decoder
        tasks, most = [find_task(name) for name in plan.tasks], AnswerOptions(max_seconds=plan.max_seconds)
        codec: Any = CODECS[shape.codec]
        rows = min(plan.rows, plan.questions * len(tasks))
        heard = clips_of(self.config.data.packing.length, shape)[0] if any(t.question == "audio" for t in tasks) else 0
        columns = max(most.limits(task, codec, shape.layout.max_delay).columns for task in tasks)
        length = min(heard + PROMPT + columns, c.context)
        cache = 2 * (c.layers + c.post_layers) * rows * length * c.kv_heads * c.head_size
        fed = rows * min(heard + PROMPT, CHUNK) * (4 * c.mlp_width + (6 + len(shape.layout)) * c.width)
        frames = rows * (shape.encoder.positions if shape.encoder.fixed_length else heard * shape.projector.stack)
        inner = max(part.out_features for part in self.model.projector.modules() if isinstance(part, nn.Linear))
        hearing = frames * max(12 * shape.encoder.width, 4 * inner / shape.projector.stack)
        return self.answer * (cache + max(fed, hearing))


def estimate(config: FitConfig, model: SpeechModel, cuda: bool = False) -> Memory:
    """Counts the memory of a run of the fullest batches on each device; UserError for settings that do not fit each other."""
    world, sharded = config.fabric.processes or 1, config.fabric.strategy == "fsdp"
    dims = ParallelDims.of(config.fabric, world)
    process_shards(config.data.micro_batches, 0, dims.data)
    share = dims.shards * dims.tensor if sharded else 1
    packed, passes = packed_bytes(config, model), Activations(config, model, cuda)
    parts = {name: size / share for name, size in held(config, model, packed).items()}
    parts["weights"] += sum(packed.values()) * (1 - 1 / share)  # whole in every process
    rows, kept_rows, uncounted = balanced(config, model)
    several = config.data.micro_batches > dims.data
    buckets, gathered, unsharded = exchanged(config, model, world, several)
    batch = [*(getattr(passes.batch, name) for name in passes.batch.TENSORS), *passes.batch.supervised]
    summed = 4.0 * count(p for _, p in learning(model)) / dims.tensor if several and share > 1 else parts["gradients"]
    before = summed * (several or rows > 0)
    (decoder, d_again), (encoder, e_again) = passes.stacks()
    (heads, losses), (d_back, e_back), around = passes.heads(), passes.backward(), passes.around()
    groups = [g["params"] for g in parameter_groups(learning(model), config.optimizer) if g["rule"] == "muon"]
    muon = sum(map(count, groups))  # whose updates are orthogonalised together, all of a shape
    full, whole = parts["gradients"], {"gathered": unsharded}
    kept = {"gradients": before, "activations": decoder + encoder + around + passes.copies()}
    phases: dict[str, Parts] = {
        "losses": {**kept, "heads and losses": heads + losses, "gathered": gathered},
        "backward of the decoder": {**kept, "heads and losses": heads, "working": d_again + d_back, **whole},
        "backward of the encoder": {"gradients": summed, "activations": encoder + around, "working": e_again + e_back, **whole},
        "optimizer": {"gradients": full, "working": 16.0 * muon},
    }
    if rows:
        phases["gradients of tasks"] = {"gradients": full, "working": 2 * rows / share}
    if config.validation.asks:
        size = passes.answer
        same = size == bytes_each(config)[0] and share == 1 and config.lora is None and not (config.ema and size == 2)
        copies = 0.0 if same else float(size * count(p for n, p in model.named_parameters() if ".lora." not in n))
        phases[ANSWERS] = {"activations": passes.answers(), "copies of weights": copies}
    sizes = float(sum(t.nbytes for t in batch))
    sound = 4 * SAMPLE_RATE / model.config.encoder.frames_per_second * max(passes.batch.frames, default=0)
    held_out = config.validation.questions * (sizes / passes.batch.examples + sound) * (not cuda)
    fixed = {"gradients": 0.0, "balance": kept_rows / share, "buckets": buckets, "batch": sizes, "held-out rows": held_out}
    steady = {**parts, **fixed}
    phases = {name: {part: float(size) for part, size in {**steady, **own}.items()} for name, own in phases.items()}
    if packed and not cuda:  # a CPU reads the base whole in fp32
        phases[START] = {"weights": 4.0 * count(p for n, p in model.named_parameters() if ".lora." not in n)}
    own = 4.0 * count(p for _, p in learning(model)) / share
    stored = (parts["weights"] if config.lora is None else own) + parts["optimizer"] + parts["average"]
    return Memory(phases, stored * (1 + sharded) * config.checkpoint.asynchronous, stored * share, uncounted)


def exchanged(config: FitConfig, model: nn.Module, world: int, several: bool) -> tuple[float, float, float]:
    """Bytes of DDP's buckets, which hold all gradients once more, and of FSDP2's whole weights: root and two blocks; in
    the backward pass also gradients of root and a block, and all weights where one of `several` micro-batches follows."""
    frozen, trained = bytes_each(config)
    if world == 1 or config.fabric.strategy != "fsdp":
        return float(trained * count(p for _, p in learning(model))) * (world > 1), 0.0, 0.0

    def sizes(part: nn.Module) -> tuple[int, int]:
        every, own = count(part.parameters()), count(p for _, p in learning(part))
        return 2 * every if config.fabric.precision == "bf16-mixed" else trained * own + frozen * (every - own), trained * own

    blocks = [sizes(block) for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    (weights, gradients), whole = ([part[i] for part in blocks] for i in (0, 1)), sizes(model)
    gathered, own = whole[0] - sum(weights) + 2 * max(weights), whole[1] - sum(gradients) + max(gradients)
    return 0.0, float(gathered), float((whole[0] if several else gathered) + own)


def balanced(config: FitConfig, model: SpeechModel) -> tuple[float, float, str]:
    """Bytes of the gradients that a balance takes of all tasks, and of those that it keeps, and what is not counted."""
    section = config.balance
    if section is None or (section.at != "parameters" and not section.spec.bilevel):
        return 0.0, 0.0, ""
    m = len(balanced_tasks(section, config.data)) or len(model.layout)
    if section.spec.bilevel:
        return 0.0, 0.0, f"not counted: copies of what is trained, and up to {m} gradients of it, of balance {section.method}"
    rows = m * bytes_each(config)[1] * float(count(p for _, p in learning(model)))
    return rows, rows * section.spec.keeps, ""
