"""How answers are made: sampling, limits and policies, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, TypedDict

from omni.audio.codec import AudioCodec
from omni.edit.deltas import Edits
from omni.errors import UserError
from omni.generate.bounds import check_number
from omni.generate.sampling import GREEDY, SamplingPlan
from omni.tasks import Task


class OptionValues(TypedDict, total=False):
    """The fields of `Options` as the keywords of a call."""

    sampling: SamplingPlan
    seed: int
    max_seconds: float
    max_tokens: int
    text_assist: bool
    overflow: Literal["end", "forget"]
    adapter: str | None
    edits: Edits | None


class SessionOptions(OptionValues, total=False):
    """The keywords of `SpeechLM.session`."""

    context: int | None


@dataclass(frozen=True)
class Options:
    """How answers are made.

    Attributes:
        sampling: one `Sampling`, or one per stream or kind.
        seed: of the random draws; the turns of a conversation draw differently.
        max_seconds: longest spoken answer.
        max_tokens: longest answer of a task that only writes (and, without a codec, most frames of a spoken
            one).
        text_assist: let a second row write the text of spoken answers.
        overflow: what a question does that finds no room in the cache. `end`: it is refused with a UserError.
            `forget`: the oldest turns are dropped until a quarter of the cache is free (or only the question
            is left).
        adapter: name of one that was loaded (`SpeechLM.load_adapter`); None for the model as it is.
        edits: corrections (`omni.edit`) that act on these answers only, beside the adapter.
    """

    sampling: SamplingPlan = GREEDY
    seed: int = 0
    max_seconds: float = 30.0
    max_tokens: int = 512
    text_assist: bool = False
    overflow: Literal["end", "forget"] = "end"
    adapter: str | None = None
    edits: Edits | None = None

    def __post_init__(self) -> None:
        for name in ("seed", "max_seconds", "max_tokens"):
            check_number(name, getattr(self, name))
        if self.overflow not in ("end", "forget"):
            raise UserError(f"overflow {self.overflow!r} is unknown; use 'end' or 'forget'")

    def limits(self, task: Task, codec: AudioCodec | None, max_delay: int) -> tuple[int, int]:
        """Most frames and most columns of an answer; one column is for the end."""
        frames = self.max_tokens if codec is None else max(1, ceil(self.max_seconds * codec.frame_rate - 1e-9))
        return frames, (frames + max_delay if task.audio else self.max_tokens) + 1
