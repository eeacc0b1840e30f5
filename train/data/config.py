"""Configuration of a run's data; `train.data.build` builds the pipeline from it."""

from __future__ import annotations

import math
from dataclasses import asdict, field, fields
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from omni.config import from_dict
from omni.errors import UserError
from omni.tasks import TASKS, Task, find_task
from omni.utils.configuration import Share, configuration, span
from train.data.readers.contract import RecordOptions
from train.data.sources import SourceOptions, find_source
from train.data.sources.mixture import Stage, TaskMixture, Weight, check_schedule

Range = tuple[float, float]


@configuration
class SoundAugmentConfig:
    """Changes of a question's sound. The default changes nothing. A range is (lowest, highest), drawn uniformly.

    UserError: a range upside down or out of its bounds, a probability beyond 1.
    """

    speed: Annotated[Range | None, span(0.25, 4)] = None
    """Playing speed, in steps of 0.01, pitch and length changing with it: (0.9, 1.1)."""
    noise_snr_db: Annotated[Range | None, span(-60, 120)] = None
    """Power of the clip over the power of the noise added to it, in dB: (5, 30)."""
    noise_probability: Share = 1.0
    """Part of the clips that noise is added to."""
    noise_folder: str | None = None
    """Sound files to take half of the noise from, searched in all folders below. None: generated noise, white to pink."""
    echo_probability: Share = 0.0
    """Part of the clips that are heard in a room, whose echo falls by 60 dB in 0.12 to 0.5 s."""
    band_probability: Share = 0.0
    """Part of the clips that come by telephone: nothing below 200 and above 3,600 Hz, noise and echo included."""

    def __post_init__(self) -> None:
        if self.noise_folder is not None and self.noise_snr_db is None:
            raise UserError(f"augment.noise_folder={self.noise_folder!r} without noise_snr_db: say how loud the noise is")


@configuration
class AugmentConfig(SoundAugmentConfig):
    """Settings of the augmentation: those of the sound, and of the features that are made of it."""

    warp_speed: Annotated[Range | None, span(0.25, 4)] = None
    """Playing speed, by stretching the features over time: (0.9, 1.1)."""
    warp_bands: Annotated[Range | None, span(0.5, 2)] = None
    """Length of the speaker's vocal tract, by stretching the features over the mel bands: (0.9, 1.1)."""
    feature_noise: Annotated[Range | None, span(-20, 10)] = None
    """Log10 of the power of noise added to the features of half of the clips (speech peaks near 1): (-6, -1)."""
    feature_gain_db: Annotated[Range | None, span(-120, 60)] = None
    """Loudness change of the features in dB: (-16, 8)."""
    feature_shape_db: Annotated[float, Field(ge=0, le=40)] | None = None
    """Another microphone: a smooth curve over the mel bands, its standard deviation up to this many dB."""
    feature_echo: Annotated[Range | None, span(1, 1000)] = None
    """Frames in which the echo of another room, 3 to 18 dB below the sound, falls by 60 dB: (5, 35)."""
    feature_echo_probability: Share = 0.5
    """Part of the clips that echo."""
    feature_range: Annotated[Range | None, span(0.5, 8)] = None
    """Another recorder's floor: what lies further below the loudest band, in log10 of power, is raised to it: (3.4, 5.4)."""
    pauses: Annotated[Range | None, span(0, 10)] = None
    """Seconds of silence that is put between words, as speakers who think do: (0.2, 1.0)."""
    pause_probability: Share = 0.5
    """Part of the clips with such pauses: one, or as often two."""
    pause_before: Annotated[Range, span(0, 10)] = (0.0, 0.8)
    """Seconds of silence before the first sound of all clips, where there are `pauses`."""
    pause_after: Annotated[Range, span(0, 10)] = (0.0, 1.6)
    """The same after the last sound. Longer than `pauses`: a silence longer than any of them is an end."""
    freq_masks: tuple[NonNegativeInt, NonNegativeInt] = (0, 12)
    """Number of masks over mel bands, and the most bands of one."""
    time_masks: tuple[NonNegativeInt, NonNegativeInt] = (0, 20)
    """Number of masks over time, and the most frames of one, which hides a fifth of the clip at most."""


MOST_COLUMNS = 1 << 22
"""Largest micro-batch, in columns: no device holds the activations of more."""
OF_FILES = {"stored": {"path", "held_out", "order", "window"}, "stream": {"path", "held_out", "window", "read"}}
"""Keys of a source by the kinds that have them, which read files."""
WINDOW = 256
"""Rows of a window, unless `SourceConfig.window` says otherwise."""
AlignmentKind = Literal["none", "letters", "words", "tokens"]


@configuration
class PackingConfig:
    """Shape of a micro-batch.

    Attributes:
        rows: rows of a micro-batch.
        length: columns of a row.
        buffer: examples to choose from when a row is filled (or more, where they are short).
        too_long: an example that no row can hold, or whose question the encoder's window cannot, is an `error`, or skipped and
            counted (`skip`).
    """

    rows: PositiveInt = 8
    length: PositiveInt = 1024
    buffer: PositiveInt = 16
    too_long: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        if self.rows * self.length > MOST_COLUMNS:
            raise UserError(
                f"data.packing has rows {self.rows} and length {self.length}; make their product {MOST_COLUMNS} at most"
            )


@configuration
class SourceConfig:
    """One source of the mixture.

    Attributes:
        kind: `stored`: the Parquet file or folder at `path`, or a list of them, one after another. `stream`: the WebDataset or
            Parquet shards at `path`, of a format of `data prepare`, read and encoded while training. Others are made while
            training, by plug-ins: `spoken-digits` and `recorded-digits` ship with the package (`recipes/digits`).
        weight: share of the draws, relative to the other sources: a number, or points [draw, weight] of one that changes, with
            straight lines between them, counted over all sources and processes; with `data.draws` [share of these, weight].
        max_epochs: how often the rows of the source are drawn at most (on average, such as 1.5); the other sources then share
            its weight. Null for any number.
        max_rows: rows of the source that are drawn at most, repeated ones included; null for any number.
        tasks: weights of the tasks its rows are used for (a row that names its own task keeps it).
        stages: other weights for the first draws: a curriculum.
        held_out: of a source that is stored or a stream, rows for validation: a Parquet file or folder of them; or of a
            stored one a number of its own rows, evenly spaced, which are then not trained on; null for none. Sources that read
            the same path hold out alike.
        order: of a stored source: `random`, any row may follow any other; `sequential`, pieces of 32 rows are shuffled, each is
            read once an epoch and as a whole, and rows are drawn from a window of pieces: for buckets and slow disks.
        window: rows from which each packer draws, and which it keeps in memory, where the order is sequential; of a stream,
            those that it reads ahead and shuffles.
        read: of a stream, how its records become rows, as `data prepare` takes it; null recognises the format.
        options: of a kind that a plug-in makes, its own settings.
    """

    kind: str = "stored"
    weight: float | tuple[tuple[float, float], ...] = 1.0
    max_epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    max_rows: PositiveInt | None = None
    tasks: dict[str, float] = field(default_factory=lambda: {"A1A2": 1.0})
    stages: tuple[Stage, ...] = ()
    path: tuple[str, ...] | str | None = None
    held_out: int | str | None = None
    order: Literal["random", "sequential"] = "random"
    window: PositiveInt = WINDOW
    read: RecordOptions | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", asdict(self.made))  # with what is not given, so that a stored run is complete
        for key in fields(self):
            kinds = [kind for kind, names in OF_FILES.items() if key.name in names]
            if kinds and self.kind not in kinds and (value := getattr(self, key.name)) != key.default:
                raise UserError(f"{key.name} is {value!r}, which a source of kind {self.kind!r} has not: leave it out")
        if self.kind == "stored" and not self.path:
            raise UserError("a source of kind 'stored' has no path; name its Parquet file or folder")
        if self.kind == "stream" and not (self.path and isinstance(self.path, str)):
            raise UserError("a source of kind 'stream' has no path; name a shard, a folder of shards, or a pattern: a-*.tar")
        if self.kind == "stream" and isinstance(self.held_out, int):
            raise UserError(
                f"held_out is {self.held_out}, but the rows of a stream are not known before: name a file of others"
            )
        if self.kind == "stored" and self.order == "random" and self.window != WINDOW:
            raise UserError(f"source.window is {self.window}, but order is random, which has none: set order to sequential")
        if isinstance(self.held_out, int) and self.held_out < 1:
            raise UserError(f"held_out is {self.held_out}; give a number from 1 upwards, a file of rows, or null for none")
        try:
            TaskMixture(self.tasks, self.stages)
        except UserError as error:
            raise UserError(f"the source {self.path or self.kind}: {error}") from error

    def limit(self, size: int | None) -> int | None:
        """Most rows that the source gives if it has `size` of them; None for any number. UserError: the epochs of a source
        without end are limited, or to less than a row."""
        if self.max_epochs is None:
            return self.max_rows
        if size is None:
            raise UserError(
                f"max_epochs is {self.max_epochs:g}, but rows come without end, or uncounted: give max_rows instead"
            )
        rows = round(self.max_epochs * size)
        if not rows:
            raise UserError(f"max_epochs is {self.max_epochs:g}: of {size} rows it leaves none; give more, or drop the source")
        return rows if self.max_rows is None else min(rows, self.max_rows)

    @cached_property
    def made(self) -> SourceOptions:
        """The options as those of the kind."""
        return from_dict(find_source(self.kind), self.options, f"the source {self.kind}: options")

    @property
    def has_held_out(self) -> bool:
        """True where there are rows for validation."""
        return self.held_out is not None or self.made.has_held_out

    @property
    def folders(self) -> tuple[str, ...]:
        """The files, folders or addresses of `path`."""
        return (self.path,) if isinstance(self.path, str) else self.path or ()

    @property
    def drawn(self) -> set[str]:
        """Names of the tasks that rows are drawn for, unless they name one themselves."""
        return {name for mixture in self.mixtures for name, weight in mixture.items() if weight > 0}

    @property
    def mixtures(self) -> list[dict[str, float]]:
        """Weights of tasks: of the source, of each stage, and of rows that name their own."""
        own = self.made.own_tasks
        return [self.tasks, *(stage.tasks for stage in self.stages), *([own] if own else [])]


@configuration
class DataConfig:
    """The data of a run.

    Attributes:
        draws: draws of the run, over all sources and processes, of which the points of weights name shares from 0 to 1; null
            where they name draws.
        seed: of all draws.
        micro_batches: micro-batches of a step over all processes; each process takes as many.
        packing: shape of a micro-batch.
        alignment: how questions are spelt for the alignment head, see `Alignment`; `none` without one.
        words: of the alignment `words`, besides those of sources that are made while training.
        sounds: questions are also spelt by the sounds of English, for the alignment head's second half: sounds are trained on
            any words, and stay the same when other people say them.
        augment: changes to what is heard; null for none. Of cached utterances (`options.reuse`) only the features are changed
            again on every draw.
        cut: share of the answers within conversations, other than the last, that are cut at a random place, as listeners cut
            them who interrupt; the turns after it are trained to go on from what was heard.
        broken: a row that is broken or lacks what its task needs is an `error`, or skipped and counted (`skip`): in a large
            set there is always one.
        broken_limit: share of a source's rows for a task that may be skipped so; beyond it, from 100 draws on and by more than
            chance, the run stops.
        system: rows' system messages come before their first questions; false leaves them out.
        workers: processes that make batches, for each process that trains; 0 makes them there.
        prefetch: steps each of them works ahead.
    """

    sources: tuple[SourceConfig, ...] = ()
    draws: PositiveInt | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    micro_batches: PositiveInt = 1
    packing: PackingConfig = field(default_factory=PackingConfig)
    alignment: AlignmentKind = "none"
    words: tuple[str, ...] = ()
    sounds: bool = False
    augment: AugmentConfig | None = None
    cut: Share = 0.0
    broken: Literal["error", "skip"] = "error"
    broken_limit: Share = 0.1
    system: bool = True
    workers: NonNegativeInt = 1
    prefetch: PositiveInt = 2

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("data.sources is empty; name at least one source")
        names = [f"data.sources.{i}.weight" for i in range(len(self.sources))]
        check_schedule(names, [source.weight for source in self.sources], math.inf if self.draws is None else 1)
        kept_back = {folder: source for source in self.sources if isinstance(source.held_out, int) for folder in source.folders}
        for i, source in enumerate(self.sources):
            for other in (kept_back[folder] for folder in source.folders if folder in kept_back):
                if (source.path, source.held_out) != (other.path, other.held_out):
                    raise UserError(
                        f"data.sources.{i}.held_out is {source.held_out}, but another source of {', '.join(other.folders)} "
                        f"holds out {other.held_out} rows, which would be trained on here: give both the same"
                    )
        if self.sounds and self.alignment in ("none", "tokens"):
            first = f"data.alignment is {self.alignment}: choose words or letters with it"
            raise UserError(f"data.sounds is a second spelling, but {first}")

    @property
    def weights(self) -> list[Weight]:
        """Weights of the sources; places of points are draws."""
        return [
            source.weight
            if self.draws is None or not isinstance(source.weight, tuple)
            else tuple((self.draws * share, weight) for share, weight in source.weight)
            for source in self.sources
        ]

    @property
    def drawn(self) -> set[str]:
        """Names of the tasks that the mixture can draw."""
        return set().union(*(source.drawn for source in self.sources))


def tasks_of(data: DataConfig) -> list[Task]:
    """The tasks that the mixture can draw, in the table's order."""
    names = {find_task(name).name for name in data.drawn}
    return [task for name, task in TASKS.items() if name in names]
