"""Makes the held-out batches on which the balance methods of two levels evaluate a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni.errors import UserError
from train.data.batching.batch import Batch
from train.data.batching.examples import ExampleMaker
from train.data.batching.packer import PackerShard, Pipeline
from train.data.build import held_out_rows
from train.data.rows.row import Row
from train.data.sources.mixture import Mixture, TaskMixture

if TYPE_CHECKING:
    from train.config.run import FitConfig


class KeptRows:
    """A source of given rows."""

    repeats = False

    def __init__(self, rows: Sequence[Row]) -> None:
        self.name, self.rows, self.size = "held-out rows", list(rows), len(rows)

    def identity(self, index: int) -> int:
        return index

    def row(self, index: int) -> Row:
        return self.rows[index]


def outer_batches(config: FitConfig, names: Sequence[str], maker: ExampleMaker) -> list[Batch]:
    """Makes batches of held-out rows in all balanced tasks, without augmentation; the same ones every time.

    Args:
        names: the balanced tasks; where streams are balanced, none: tasks are drawn as the first source has them.

    Raises:
        UserError: the data have no held-out rows.
    """
    assert config.balance is not None
    section, data = config.balance, config.data
    try:
        rows = held_out_rows(data, maker.codec, section.rows)
    except UserError as error:
        raise UserError(f"balance.method {section.method} judges by held-out rows: {error}") from error
    plain_maker = ExampleMaker(maker.model, maker.tokenizer, maker.codec, maker.alignment, None, seed=data.seed)
    tasks = dict.fromkeys(names, 1.0) if names else data.sources[0].tasks
    pipeline = Pipeline(
        Mixture([KeptRows(rows)], [1.0], data.seed), [TaskMixture(tasks)], plain_maker, data.packing, data.seed, broken="skip"
    )
    shard, batches, examples = PackerShard(pipeline, 0, 1), [], 0
    while examples < len(rows) * len(tasks):
        batches.append(shard.batch())
        examples += batches[-1].examples
    return batches
