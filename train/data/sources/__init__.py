"""Sources of rows, and their kinds: `stored` and `stream` read files; others are made while training, by plug-ins.

@register_source("tones")    # in mine.py
@dataclass(frozen=True)
class Tones(SourceOptions):
    pitch: float = 440.0

    def build(self, codec, seed): ...

sources: [{kind: tones, options: {pitch: 220}}]    # in the configuration of a run
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from omni.plugins import Registry, load_plugins

if TYPE_CHECKING:
    from omni.codec.base import AudioCodec
    from train.console.progress import Progress
    from train.data.rows.row import Row


class Source(Protocol):
    """A source of rows by number. `row(index)` is a pure function of the index, so that any draw can be repeated.

    Attributes:
        size: number of rows, None for an endless source.
        repeats: rows are drawn again so soon that results computed from them are worth caching.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    @property
    def repeats(self) -> bool: ...

    def identity(self, index: int) -> int:
        """A number that two draws share only where their rows are equal."""
        ...

    def row(self, index: int) -> Row:
        """Read or make row `index`; UserError naming it where it is broken."""
        ...


class MadeSource(Source, Protocol):
    """A source whose rows are made while training. Its `name` is that of its kind."""

    def held_out(self, count: int, seed: int) -> list[Row]:
        """Makes rows for validation; asked where `SourceOptions.has_held_out`."""
        ...


@dataclass(frozen=True)
class SourceOptions:
    """What a kind of source has under `options`; a plug-in's kind is a frozen dataclass with fields of its own.

    Its module is imported whenever the kind is named: heavy libraries are better imported by `build`. It may also have
    `demonstrate(config)`, what `omni-train demo` does with such a run, and `paused_questions(codec, count, voices)`, what
    `omni-train eval --turn_ends` asks.

    Attributes:
        vocabulary: words that questions may have, for the alignment `words`.
        own_tasks: tasks that rows name themselves, and the share of the draws that do.
        has_held_out: there are rows for validation.
    """

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return ()

    @property
    def own_tasks(self) -> dict[str, float]:
        return {}

    @property
    def has_held_out(self) -> bool:
        return False

    def build(self, codec: AudioCodec | None, seed: int) -> MadeSource:
        """Makes the source; UserError where it cannot be made, as without a codec where answers are spoken."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuses (UserError) files that are not there, before a run starts."""

    def prepare(self, progress: Progress) -> None:
        """Makes what training would otherwise wait for, once before it starts."""


SOURCES: Registry[type[SourceOptions]] = Registry("source")
for _kind in ("stored", "stream"):
    SOURCES.add(_kind, SourceOptions)


def register_source(kind: str) -> Callable[[type[SourceOptions]], type[SourceOptions]]:
    """A decorator for the options of a kind of source (`SourceOptions`), which make it."""
    return SOURCES.register(kind)


def find_source(kind: str, where: str = "source.kind") -> type[SourceOptions]:
    """The options of a kind of source, perhaps of a plug-in that ships with the package. UserError: there is none; the closest
    name is given, after the key `where` it came from."""
    if kind not in SOURCES:
        load_plugins(shipped())
    return SOURCES.find(kind, where)


def shipped() -> list[str]:
    """Names of the plug-ins beside recipes of the package, which are found without being named."""
    from train.console.command import RECIPES

    return [str(file.parent.resolve()) for file in sorted(RECIPES.glob("*/__init__.py"))]
