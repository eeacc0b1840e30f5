"""Options of answers (sampling, limits and policies) as one frozen value, the keywords that make one, and the bounds of
numbers, which the command line shares.

Nothing heavy is imported here, so that a bad value is refused before a model is read. Besides the fields of `AnswerOptions`,
calls take the names that transformers and OpenAI have for the sampling of all streams (`SamplingNames`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict

from pydantic import Field

from omni.errors import UserError, brief
from omni.utils.arguments import meant
from omni.utils.configuration import configuration, validate

if TYPE_CHECKING:
    from omni.codec.base import AudioCodec
    from omni.edit.deltas import Edits
    from omni.tasks import Task


Temperature = Annotated[float, Field(ge=0, le=1000)]
TopK = Annotated[int, Field(ge=0, lt=2**31)]
TopP = Annotated[float, Field(ge=1e-6, le=1)]
Penalty = Annotated[float, Field(ge=1e-3, le=1000)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
AnswerSeconds = Annotated[float, Field(ge=1e-3, le=86_400)]
Tokens = Annotated[int, Field(ge=1, le=2**20)]
Silence = Annotated[float, Field(ge=1e-2, le=86_400)]
Positions = Annotated[int, Field(ge=1, lt=2**31)]
Rate = Annotated[int, Field(ge=1, le=768_000)]
Channel = Annotated[int, Field(ge=0, lt=1024)]
"""Numbers that the command line has too."""

NUMBERS = {
    "seed": Seed,
    "context": Positions,
    "batch_size": Positions,
    "drain": Annotated[float, Field(ge=0, le=1e9)],
    "played_seconds": Annotated[float, Field(ge=0, le=1e9)],
    "shown_characters": Annotated[int, Field(ge=0, lt=2**63)],
    "slots": Annotated[int, Field(ge=1, le=65_536)],
    "patience": AnswerSeconds,
    "queue": Annotated[int, Field(ge=0, lt=2**31)],
    "threads": Annotated[int, Field(ge=1, le=1024)],
}
"""Numbers that are arguments of their own."""


def check_numbers(**values: float | None) -> None:
    """Refuses (UserError) one of `NUMBERS` that is out of its range; None counts as not given."""
    for name, value in values.items():
        if value is not None:
            hint: Any = NUMBERS[name]
            validate(hint, value, lambda path, name=name: name)  # type: ignore[misc]


@configuration
class Sampling:
    """How an id is chosen from its logits. Applied in this order: repetition penalty, temperature, top-k, top-p.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest id (greedy), and top-k and top-p have no
            say.
        top_k: keep the k likeliest ids; 0 keeps all.
        top_p: keep the smallest set of likeliest ids whose probabilities (after top-k) sum to at least p.
            Without a `top_k` beside it this sorts the whole vocabulary at each step.
        repetition_penalty: the logits of ids that the answer already has on this stream are divided by it
            where positive and multiplied where negative (Keskar et al. 2019, "CTRL"); 1 changes nothing.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    repetition_penalty: Penalty = 1.0

    __repr__ = brief


GREEDY = Sampling()

SamplingPlan = Sampling | Mapping[str, Sampling]
"""One setting for all streams, or one per kind (`text`, `audio`) or stream (`audio0`, ...); a stream that is not named is
greedy, and its own name goes before its kind."""

Stop = str | Sequence[str] | Callable[[str], bool] | None
"""Ends an answer that writes: texts, or a function of its text so far."""


class SamplingNames(TypedDict, total=False):
    """One `Sampling` for all streams, by its fields; None counts as not given.

    `do_sample=False` is greedy, `do_sample=True` draws. Where a draw is asked for without a temperature (by `do_sample`,
    `top_k` or `top_p`) it is 1.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    do_sample: bool | None


class OptionValues(TypedDict, total=False):
    """The fields of `AnswerOptions` as the keywords of a call."""

    sampling: SamplingPlan
    seed: int
    max_seconds: float
    max_tokens: int
    max_new_tokens: int | None
    stop: Stop
    max_silence: float | None
    logprobs: bool
    text_assist: bool
    overflow: Literal["end", "forget"]
    adapter: str | None
    edits: Edits | None
    system: str


class Keywords(OptionValues, SamplingNames, total=False):
    """The keywords that make an `AnswerOptions`."""


class SessionOptions(Keywords, total=False):
    """The keywords of one question: those of `SpeechLM.session` that do not need a conversation."""

    context: int | None


class Limits(NamedTuple):
    """Where an answer is cut: a spoken one after so many frames, any after so many columns (time steps), before a stop string,
    and after so many seconds of silence."""

    frames: int
    columns: int
    stop: Sequence[str] = ()
    silence: float | None = None


@configuration
class AnswerOptions:
    """Options of answers.

    Attributes:
        sampling: one `Sampling`, or one per stream or kind.
        seed: of the random draws; the turns of a conversation draw differently.
        max_seconds: longest spoken answer.
        max_tokens: most tokens of the answer of a task that only writes, its end included (and, without a codec, most frames of
            a spoken one).
        max_new_tokens: most time steps of any answer, its end included. A step writes one token of text and one of each code
            stream; a spoken answer ends at the lesser of this and `max_seconds`, a written one at this alone.
        stop: texts that end an answer which writes: its text ends before the first of them, its sound with the time step that
            completed it. Or a function that is given the text so far after each piece of it, and returns whether the answer
            ends with this piece. It is called by whoever takes the events, so that a slow one holds nobody else; one that
            raises ends the answer with an error.
        max_silence: seconds for which the answer's sound may be silent before it ends, its beginning included; needs a codec.
        logprobs: return the log-probabilities of tokens and codes (`Answer.logprobs`).
        text_assist: let a second row write the text of spoken answers.
        overflow: policy for a question for which the cache has no room. `end`: it is refused with a UserError.
            `forget`: the oldest turns are dropped until a quarter of the cache is free (or only the question
            is left); where a question like those before would bring them there, until half of it is free. What stays is fed
            again before the next question comes (`omni.engine.prefill_ahead`).
        adapter: name of one that was loaded (`SpeechLM.load_adapter`); None for the model as it is.
        edits: corrections (`omni.edit`) that act on these answers only, besides the adapter.
        system: a system message before the first question, such as "Answer in one sentence."; "" for none. Only a model that
            was trained with system messages follows one (docs/data.md).
    """

    sampling: SamplingPlan = GREEDY
    seed: Seed = 0
    max_seconds: AnswerSeconds = 30.0
    max_tokens: Tokens = 512
    max_new_tokens: Tokens | None = None
    stop: Stop = None
    max_silence: Silence | None = None
    logprobs: bool = False
    text_assist: bool = False
    overflow: Literal["end", "forget"] = "end"
    adapter: str | None = None
    edits: Any = None
    system: str = ""

    def __post_init__(self) -> None:
        called = callable(self.stop) and not inspect.iscoroutinefunction(self.stop)
        listed = self.stop is None or isinstance(self.stop, (str, list, tuple)) or called
        if not listed or not all(isinstance(text, str) and text for text in self.stops):
            ways = "a text, or a list of several, none of them empty, or a function of the text so far"
            raise UserError(f"stop is {repr(self.stop)[:80]}; it must be {ways}")

    __repr__ = brief

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts of `stop`."""
        if self.stop is None or callable(self.stop):
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def limits(self, task: Task, codec: AudioCodec | None, max_delay: int) -> Limits:
        """Where an answer is cut; of a spoken one, a time step more than its frames need is for the end. Without a codec, which
        knows a frame's length, `max_new_tokens` limits the frames, or else `max_tokens`."""
        most = self.max_new_tokens
        frames = (most or self.max_tokens) if codec is None else max(1, ceil(self.max_seconds * codec.frame_rate - 1e-9))
        columns = frames + max_delay + 1 if task.audio else most or self.max_tokens
        return Limits(frames, columns if most is None else min(columns, most), self.stops, self.max_silence)


def make_options(values: Mapping[str, Any]) -> AnswerOptions:
    """Makes the options from a call's keywords; None counts as not given. TypeError: an unknown keyword. UserError:
    `sampling` and a name of its fields together, `max_tokens` and `max_new_tokens` together, or a bad value."""
    if unknown := values.keys() - Keywords.__annotations__.keys():
        raise TypeError(f"unknown keyword {min(unknown)}; {meant(min(unknown), Keywords.__annotations__) or 'leave it out'}")
    values = {name: value for name, value in values.items() if value is not None}
    named = {name: values[name] for name in SamplingNames.__annotations__ if name in values}
    fields = {name: value for name, value in values.items() if name not in named}
    if named and "sampling" in fields:
        said = ", ".join(f"{name}={value!r}" for name, value in named.items() if name != "do_sample")
        raise UserError(f"{next(iter(named))} and sampling were given together; write sampling=Sampling({said})")
    if "max_new_tokens" in fields and "max_tokens" in fields:
        raise UserError("max_tokens and max_new_tokens were given together; give one of them")
    if named:
        fields["sampling"] = _sampling(named)
    return AnswerOptions(**fields)


def _sampling(named: Mapping[str, Any]) -> Sampling:
    fields = dict(named)
    wanted = fields.pop("do_sample", None)
    temperature = fields.get("temperature")
    if wanted is False:
        if temperature:
            raise UserError(f"do_sample is False, but temperature is {temperature}; leave one of them out")
        return Sampling(repetition_penalty=fields.get("repetition_penalty", 1.0))
    if wanted and temperature == 0:
        raise UserError("do_sample is True, but temperature is 0, which draws nothing; leave one of them out")
    if temperature is None and (wanted or fields.keys() - {"temperature", "repetition_penalty"}):
        fields["temperature"] = 1.0
    return Sampling(**fields)
