"""The loss of held-out rows: teacher-forced, over all processes, in nats per target.

Rows are those that validation asks, each once for every task that its source trains (or its own), without augmentation, packed
into micro-batches as training packs them. Batch i belongs to process i mod world, so that a batch is the same on any number of
processes; all run equally many forwards, some over an empty batch, because FSDP2 gathers weights in each of them.

Dimensions: T tasks, K streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from omni.errors import UserError
from omni.tasks import find_task
from train.config.run import FitConfig
from train.data.batching.batch import Batch, assemble
from train.data.batching.examples import Example, ExampleMaker, Prepared, TooLong
from train.data.batching.packer import choose
from train.data.config import PackingConfig, SourceConfig
from train.data.rows.row import Row
from train.distributed.fabric import reshard
from train.distributed.process_group import ProcessGroup
from train.objective.objective import HEADS, Losses
from train.optim.ema import Average
from train.trainer.metrics import means


@dataclass(frozen=True)
class HeldOut:
    """The batches that a held-out loss is measured on.

    Attributes:
        batches: of this process; equally many in every process.
        rows, examples: over all processes.
        broken: why rows were left out, by their names.
    """

    batches: Sequence[Any] = ()
    rows: int = 0
    examples: int = 0
    broken: Mapping[str, str] = field(default_factory=dict)


def build_held_out(
    found: Sequence[tuple[SourceConfig, Sequence[Row]]],
    packing: PackingConfig,
    maker: ExampleMaker,
    rank: int,
    world: int,
    broken: dict[str, str] | None = None,
) -> HeldOut:
    """Makes the held-out batches of process `rank` of `world`; none where no example can be made.

    Examples that no packed row can hold are left out.

    Args:
        found: the rows of each source, as `held_out_by_source` gives them.
        broken: receives the reasons why rows are broken, by their names, beside its entries; such rows are left out. None where
            a broken row is an error.

    Raises:
        UserError: a row is broken.
    """
    plain_maker = ExampleMaker(maker.model, maker.tokenizer, maker.codec, maker.alignment, heard_only=maker.heard_only)
    layout, bands = maker.model.layout, maker.model.encoder.bands
    own: list[Batch] = []
    made, examples = 0, 0
    for made, rows in enumerate(
        _groups(_packed(_examples(found, packing, plain_maker, broken), packing), packing.rows), start=1
    ):
        examples += sum(map(len, rows))
        if (made - 1) % world == rank:
            own.append(assemble(rows, packing.length, layout, bands, {}))
    if len(own) < -(-made // world):
        own.append(assemble([[] for _ in range(packing.rows)], packing.length, layout, bands, {}))
    return HeldOut(own, sum(len(rows) for _, rows in found), examples, broken or {})


def _examples(
    found: Sequence[tuple[SourceConfig, Sequence[Row]]],
    packing: PackingConfig,
    maker: ExampleMaker,
    broken: dict[str, str] | None,
) -> Iterator[Example]:
    """Each row once for every task that its source trains, or for its own."""
    for number, (source, row) in enumerate((source, row) for source, rows in found for row in rows):
        prepared = Prepared(row, (0, number))  # its sound is read once for all tasks
        for name in [row.task] if row.task else [name for name, weight in source.tasks.items() if weight > 0]:
            if any(turn.lacks(find_task(name), maker.heard_only) for turn in row.turns):
                continue
            try:
                example = maker.make(number, prepared, [name] * len(row.turns))
            except TooLong:
                continue
            except UserError as error:
                if broken is None:
                    raise
                broken.setdefault(row.where, str(error))
                continue
            if len(example.columns) <= packing.length:
                yield example


def _packed(examples: Iterator[Example], packing: PackingConfig) -> Iterator[list[Example]]:
    """Examples packed into rows."""
    waiting = list[Example]()
    for example in chain(examples, [None]):
        if example is not None:
            waiting.append(example)
        while waiting and (example is None or len(waiting) >= packing.buffer):
            chosen = set(choose([len(example.columns) for example in waiting], packing.length))
            yield [example for i, example in enumerate(waiting) if i in chosen]
            waiting = [example for i, example in enumerate(waiting) if i not in chosen]


def _groups(rows: Iterator[list[Example]], size: int) -> Iterator[list[list[Example]]]:
    """Rows in groups of `size`, the last one filled up with empty ones."""
    group: list[list[Example]] = []
    for row in rows:
        group.append(row)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group + [[] for _ in range(size - len(group))]


@torch.no_grad()
def held_out_loss(
    module: Callable[..., Losses],
    objective: nn.Module,
    batches: Iterable[Any],
    tasks: Sequence[str],
    streams: Sequence[str],
    device: torch.device,
    average: Average | None,
    group: ProcessGroup,
) -> dict[str, float]:
    """Mean losses of held-out batches: `loss` over all targets, `loss/text`, `loss/audio`, and by stream and task. All
    processes must call it, with equally many batches.

    Args:
        module: the objective as Fabric has wrapped it.
        average: measured in place of the weights, where there is one.
    """
    cells = len(tasks) * len(streams)
    found = torch.zeros(2 * cells + 2 * HEADS, dtype=torch.float64)
    ones = torch.ones(len(streams) + HEADS, dtype=torch.long, device=device)
    with evaluated(objective, average):
        for batch in batches:
            losses = module(batch.to(device), ones, 1.0)
            turns, distilled = (losses.turn_sum, losses.turn_count), (losses.distill_sum, losses.distill_count)
            heads = (losses.ctc_sum, losses.ctc_count, *turns, *distilled)
            alone = [torch.zeros(1) if part is None else part[None] for part in heads]
            parts = (losses.sums.flatten(), losses.counts.flatten(), *alone)
            found += torch.cat([part.to("cpu", torch.float64) for part in parts])
    found = group.sum(found)
    sums, counts = found[: 2 * cells].view(2, len(tasks), len(streams))
    whole = {"loss": float(sums.sum() / counts.sum())} if counts.sum() > 0 else {}
    tails = zip(("loss/alignment", "loss/turn", "loss/distill"), found[2 * cells :].view(HEADS, 2), strict=True)
    aligned = {name: float(own[0] / own[1]) for name, own in tails if own[1] > 0}
    return {**whole, **means(sums, counts, tasks, streams), **aligned}


@contextmanager
def evaluated(objective: nn.Module, average: Average | None) -> Iterator[None]:
    """A context in which the objective is in eval mode with the running average as weights; restores all after, to the bit."""
    modes = [(part, part.training) for part in objective.modules()]
    kept: dict[str, Tensor] = {}
    _exchange(average, kept)
    objective.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        _exchange(average, kept)
        reshard(objective)


def _exchange(average: Average | None, kept: dict[str, Tensor]) -> None:
    """Swaps weights and average in place, which takes one parameter's memory; a second call swaps them back.

    Where their types differ, the average is left alone, and the weights are kept beside.
    """
    if average is None:
        return
    for name, p in average.params.items():
        value, before = average.values[name], p.detach().clone()
        p.copy_(kept.get(name, value))
        if p.dtype == value.dtype:
            value.copy_(before)
        else:
            kept[name] = before


def check_metric(config: FitConfig, held_out: HeldOut) -> None:
    """Refuses (UserError) to keep the checkpoints of the lowest loss where no held-out example measures it."""
    keep = config.checkpoint
    measured = held_out.examples or not config.validation.questions
    if keep.keep_best > 0 and keep.metric.partition("/")[0] == "loss" and not measured:
        raise UserError(
            f"checkpoint.metric is {keep.metric}, but none of the {held_out.rows} held-out rows makes an example: they lack "
            "what the tasks of their sources need, are broken, or do not fit into packing.length; complete them, name another "
            "metric, or set checkpoint.keep_best to 0"
        )
