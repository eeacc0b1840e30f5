"""The data pipeline: turns the number of a draw into its example, by mixture, sources, tasks and example maker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from omni.errors import UserError
from train.data.batching.examples import Example, ExampleMaker, Prepared, TooLong
from train.data.batching.unused import Unusable, Unused
from train.data.config import PackingConfig
from train.data.readers.shards import ShardError
from train.data.sources.base import drawn_row
from train.data.sources.mixture import Draw, Mixture, TaskMixture
from train.data.sources.stream_source import StreamSource
from train.data.sources.streams import StreamDraw


class Pipeline:
    """`fetch(n)` is a pure function of (seed, n, number of packers): any process may call it, in any order and again.

    Args:
        mixture: maps draws to rows.
        tasks: one mixture of tasks for each source.
        kept: number of prepared rows to cache, of sources whose rows are drawn again soon.
        broken: a broken row is an `error`, or skipped and counted (`skip`).
    """

    def __init__(
        self, mixture: Mixture, tasks: Sequence[TaskMixture], maker: ExampleMaker, packing: PackingConfig, seed: int = 0,
        kept: int = 2048, broken: str = "error",
    ) -> None:  # fmt: skip
        if len(tasks) != len(mixture.sources):
            raise UserError(f"{len(mixture.sources)} sources have {len(tasks)} mixtures of tasks; give one each")
        self.mixture = mixture
        self.names = [f"data.sources[{i}] ({source.name})" for i, source in enumerate(mixture.sources)]
        self.tasks = list(tasks)
        self.maker = maker
        self.packing = packing
        self.seed = seed
        self._kept: OrderedDict[tuple[int, int], Prepared] = OrderedDict()
        self._keep = kept
        self.broken = broken

    def fetch(self, number: int, packers: int = 1) -> Example | Unused:
        """Make the example of draw `number`, or the reason why there is none, where such draws are skipped.

        Args:
            packers: see `Mixture.draw`.

        Raises:
            UserError: a broken row, or one that no packed row or window can hold; it is named.
        """
        draw = self.mixture.draw(number, packers)
        try:
            return self._make(draw)
        except ShardError:  # of no row: what follows would not be the same
            raise
        except UserError as error:
            if (self.packing.too_long if isinstance(error, TooLong) else self.broken) != "skip":
                raise
            task, reason = (error.task, error.reason) if isinstance(error, Unusable) else ("", "the row cannot be read")
            return Unused(self.names[draw.source], task, reason, str(error))

    def marks(self, packer: int, packers: int, draws: Iterable[int]) -> dict[str, list[list[int]]]:
        """Where a packer's streams are, by the number of the source, so that these draws and later ones are made at once."""
        if not self.mixture.streams:
            return {}
        lowest: dict[int, int] = {}
        for draw in (self.mixture.draw(number, packers) for number in draws):
            if isinstance(draw.place, StreamDraw):
                lowest[draw.source] = min(draw.place.number, lowest.get(draw.source, draw.place.number))
        return {str(i): stream.marks(packer, packers, lowest.get(i)) for i, stream in self.streams()}

    def restore(self, packer: int, packers: int, marks: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Take the marks of a state."""
        for i, stream in self.streams():
            stream.restore(packer, packers, marks.get(str(i), ()))

    def streams(self) -> Iterator[tuple[int, StreamSource]]:
        """The sources that are streams, with their numbers."""
        for i in self.mixture.streams:
            source = self.mixture.sources[i]
            assert isinstance(source, StreamSource)
            yield i, source

    def _make(self, draw: Draw) -> Example:
        prepared = self._prepare(draw)
        row, mixture = prepared.row, self.tasks[draw.source]
        tasks = [row.task or mixture.task(draw.number, turn, self.seed) for turn in range(len(row.turns))]
        example = self.maker.make(draw.number, prepared, tasks, self.names[draw.source])
        if len(example.columns) <= self.packing.length:
            return example
        way = "raise packing.length" + ", or set packing.too_long to skip" * (self.packing.too_long == "error")
        raise TooLong(
            f"{example.where} takes {len(example.columns)} time steps as {'+'.join(tasks)}, a packed row holds "
            f"{self.packing.length}: {way}",
            tasks[0],
        )

    def _prepare(self, draw: Draw) -> Prepared:
        origin = self.mixture.sources[draw.source]
        if not origin.repeats:
            return Prepared(drawn_row(origin, draw.index, draw.place))
        where = (draw.source, origin.identity(draw.index))
        if where not in self._kept:
            self._kept[where] = Prepared(origin.row(draw.index), where)
            if len(self._kept) > self._keep:
                self._kept.popitem(last=False)
        self._kept.move_to_end(where)
        return self._kept[where]
