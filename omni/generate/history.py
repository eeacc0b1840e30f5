"""A conversation's past: as turns, which are laid out as columns for the cache; as messages, which can be read, and start
another session; and as a file.

The past is kept as turns: the questions, and the delivered part of the answers. The cache is a copy that can be made again: for
each question, the columns that it must hold are laid out from the turns and compared with those it does hold (`CachedHistory`).
An answer that was cut short, or whose columns were fed in another form than the offline layout, differs from some column on,
and from there it is fed again.

A message is a question (`user`) or an answer (`assistant`); they alternate. Messages of chat templates are read too:

    {"role": "user", "content": "a text"}
    {"role": "user", "content": torch.randn(16000)}                     sound in any form that a question has; a str is a text
    {"role": "assistant", "content": [{"type": "text", "text": "seven"}, {"type": "audio", "audio": "seven.wav"}]}

A saved conversation is one safetensors file, whose header holds the rest as JSON; nothing in it can run code. Per turn it has
`turn.N.audio` (the spoken question, [S] float32 at 16 kHz), or `turn.N.question` (its ids), and of the answer `turn.N.text`
(ids) and `turn.N.codes` ([A, F]), where there are any. The metadata's `conversation` holds the version, the layout, the codec's
name, the number of questions asked, and of each turn its task, whether its answer was cut, and its texts. Weights are not
checked: a model that was trained further can continue the conversation.

Dimensions: K streams, A audio streams, C columns, F frames, S samples, N features, W width.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from omni.audio.io import SAMPLE_RATE
from omni.audio.waveform import read_sound, unwrap
from omni.codec.base import AudioCodec
from omni.encoder.config import PreparedSound
from omni.errors import RoomError, UserError, brief
from omni.files import write_whole
from omni.generate.listening import FeatureStream, new_sound
from omni.generate.question import Asked, read_question
from omni.layout import Layout
from omni.model.kv_cache import KVCache
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS, Columns, Task, Turn, answer, find_task, join, prompt, system_message
from omni.text import Tokenizer

Key = tuple[int, ...]
"""Identifies a column: its K ids, and the sound and index of the feature that it takes (-1 and -1 for none)."""


@dataclass(eq=False)
class Exchange:
    """A turn, its number in the conversation, its spoken question [S] at 16 kHz, and that question's features [N, W] once
    they were made; until then what was prepared for the encoder, or heard while the sound came. `sound`: number of its
    features, by which their columns are known in a cache."""

    turn: Turn
    number: int
    clip: Tensor | None = None
    features: Tensor | None = None
    prepared: PreparedSound | None = None
    heard: FeatureStream | None = None
    sound: int = field(default_factory=new_sound)
    _parts: dict[bool, _Part] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.heard is not None:
            self.sound = self.heard.number

    def hear(self, features: Tensor | None) -> None:
        """Take its features: its columns are as many from now on."""
        self.features, self.prepared = features, None
        if features is not None and len(features) != self.turn.features:
            self.turn = replace(self.turn, features=len(features))

    def part(self, layout: Layout, answered: bool) -> _Part:
        """The columns of its question, without a system message, or those of its answer; made once, since every question of a
        conversation looks at all turns before it."""
        known, turn = self._parts.get(answered), self.turn
        if known is None or known.layout is not layout or known.turn is not turn:
            if answered:
                columns = answer(layout, turn)
                if layout.talker:
                    columns = columns[layout.written(columns.tokens)]
            elif isinstance(turn.task, Task) and turn.task.question == "audio":
                columns = _spoken(layout, turn.task, turn.features)
            else:
                columns = prompt(layout, replace(turn, system=None))
            pairs = zip(columns.tokens.T.tolist(), columns.feature_index.tolist(), strict=True)
            keys = [(*column, self.sound if index >= 0 else -1, index) for column, index in pairs]
            known = self._parts[answered] = _Part(layout, turn, columns, keys)
        return known


@lru_cache(maxsize=256)
def _spoken(layout: Layout, task: Task, features: int) -> Columns:
    """Columns of any spoken question of as many features; they are not to be changed."""
    return prompt(layout, Turn(task, features=features, system=None))


class _Part(NamedTuple):
    """Columns of a turn in a layout, and their keys."""

    layout: Layout
    turn: Turn
    columns: Columns
    keys: list[Key]


def lay_out(
    layout: Layout, past: Sequence[Exchange], asked: Exchange | None, system: Sequence[int] = ()
) -> tuple[Columns, list[Key]]:
    """All columns from the conversation's start to the end of the new question's prompt, or of the last answer where nothing
    is asked, and their keys. `system`: token ids of the system message, which comes before the first turn that is left."""
    message = system_message(layout, system)
    parts = [exchange.part(layout, answered) for exchange in past for answered in (False, True)]
    if asked is not None:
        parts.append(asked.part(layout, False))
    keys = [*((*column, -1, -1) for column in message.tokens.T.tolist()), *(key for part in parts for key in part.keys)]
    return join([message, *(part.columns for part in parts)]), keys


def fit(
    layout: Layout, past: Sequence[Exchange], asked: Exchange, system: Sequence[int], length: int, most: int, forget: bool
) -> tuple[list[Exchange], Columns, list[Key]]:
    """Lay out a conversation with a new question in a cache of `length` positions. Returns the turns that were kept, the
    columns and their keys. RoomError: there is no room for an answer.

    Args:
        most: positions of the largest cache that the model could have, for the error.
        forget: drop the oldest turns, those of `forgotten` first, until a quarter of the cache is free, or only the question
            is left.
    """
    dropped = dropped_for(layout, past, len(asked.part(layout, False).keys), system, length) if forget else 0
    past = list(past[dropped:])
    columns, keys = lay_out(layout, past, asked, system)
    if len(keys) >= length:
        way = "use overflow='forget', or start a new session" if past else "shorten the question"
        raise RoomError(
            f"history and question take {len(keys)} positions, but the session's cache has {length} and an "
            f"answer needs some: {way}{_or_larger(length, most)}"
        )
    return past, columns, keys


def dropped_for(layout: Layout, past: Sequence[Exchange], question: int, system: Sequence[int], length: int) -> int:
    """Number of the oldest turns that go before a question of so many columns, in a cache of `length` positions; no fewer than
    before a shorter one."""
    dropped, sizes = forgotten(layout, past, system, length), [_size(layout, exchange) for exchange in past]
    own = len(system_message(layout, system)) + question
    while dropped < len(past) and own + sum(sizes[dropped:]) > length - length // 4:
        dropped += 1
    return dropped


def forgotten(layout: Layout, past: Sequence[Exchange], system: Sequence[int], length: int) -> int:
    """Number of the oldest turns that go before the next question, whatever it is, in a cache of `length` positions.

    None while the longest question of these turns, asked again, would leave a quarter of the cache free; else as many as make
    three quarters of it free, but never the last. So turns go seldom, and little stays, which can be fed before the question
    comes: half a column again for each new one.
    """
    longest = max((len(exchange.part(layout, False).keys) for exchange in past), default=0)
    return forgotten_of([_size(layout, exchange) for exchange in past], longest, length, len(system_message(layout, system)))


def forgotten_of(sizes: Sequence[int], longest: int, length: int, system: int = 0) -> int:
    """`forgotten` by sizes: columns of each turn, of the longest question and of the system message."""
    taken, dropped = system + sum(sizes), 0
    if taken + longest <= length - length // 4:
        return 0
    while dropped < len(sizes) - 1 and taken > length // 4:
        taken -= sizes[dropped]
        dropped += 1
    return dropped


def _size(layout: Layout, exchange: Exchange) -> int:
    """Number of columns of a turn."""
    return len(exchange.part(layout, False).keys) + len(exchange.part(layout, True).keys)


def _or_larger(length: int, most: int) -> str:
    return ", or give a larger context" if length < most else "; the model has no more positions"


def check_room(layout: Layout, past: Sequence[Exchange], system: Sequence[int], length: int, most: int) -> None:
    """Refuse turns that fill a cache of `length` positions by themselves (RoomError); `most` as for `fit`."""
    taken = len(system_message(layout, system)) if past else 0
    taken += sum(_size(layout, e) for e in past)
    if taken >= length:
        raise RoomError(
            f"the history takes {taken} positions, but the session's cache has {length}: leave its oldest turns out, or use "
            f"overflow='forget'{_or_larger(length, most)}"
        )


@dataclass(eq=False)
class CachedHistory:
    """Content of one row of a cache.

    Attributes:
        keys: keys of its columns.
        under: the edits and adapters with which the columns were fed.
        high: number of positions written since the row was last empty.
    """

    keys: list[Key] = field(default_factory=list)
    under: Hashable = None
    high: int = 0

    def keep(self, wanted: Sequence[Key], under: Hashable, cache: KVCache, row: int) -> int:
        """Rewind a row of the cache to the prefix that it shares with `wanted`, whose rest is about to be fed; returns its
        length.

        The last of `wanted` is always fed. In a sliding window's ring the slots before the kept columns may have been
        overwritten: then the row is emptied.
        """
        keep = self.shared(wanted, under)
        self.under = under
        if keep == 0 or (cache.ring and self.high - keep > cache.chunk):
            cache.reset([row])
            keep = self.high = 0
        else:
            cache.rewind(row, keep)
        self.keys, self.high = self.keys[:keep], max(self.high, len(wanted))  # a failing prefill has written some of them
        return keep

    def shared(self, wanted: Sequence[Key], under: Hashable) -> int:
        """Length of the prefix that the row shares with `wanted`, the last of which does not count."""
        if under != self.under:  # its columns were fed with other edits or adapters than are active now
            return 0
        pairs = enumerate(zip(self.keys, wanted[:-1], strict=False))
        return next((i for i, (mine, other) in pairs if mine != other), min(len(self.keys), len(wanted) - 1))

    def add(self, columns: Sequence[Sequence[int]], position: int) -> None:
        """Record columns that steps wrote and fed; nothing was fed at `position` or beyond."""
        self.keys += [(*column, -1, -1) for column in columns]
        self.high = max(self.high, position)


# --- messages ---------------------------------------------------------------------------------------------------------

ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Message:
    """One side of a turn.

    Attributes:
        text: the written text, None where there is none (a spoken question, an answer that only speaks).
        seconds: length of its sound, 0 for none (and without a codec, which knows the length of a frame).
        audio: a spoken question, [S] at 16 kHz; codes: frames of a spoken answer, [A, F].
        task: of the turn (`omni.tasks`); by default it follows from the kinds of question and answer.
        cut: the answer is the delivered part of a longer one.
    """

    role: Literal["user", "assistant"]
    text: str | None = None
    seconds: float = 0.0
    audio: Tensor | None = field(default=None, repr=False, compare=False)
    codes: Tensor | None = field(default=None, repr=False, compare=False)
    tokens: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    task: str | None = field(default=None, repr=False, compare=False)
    cut: bool = field(default=False, repr=False, compare=False)

    __repr__ = brief


Past = tuple[Sequence[Asked], int]
"""Turns that a session starts with, and the number of questions in all, forgotten ones included: draws continue from it."""

History = Sequence[Message | Mapping[str, Any]] | str | os.PathLike[str]
"""Messages, or the path of a saved conversation."""


# --- a session's past as messages -------------------------------------------------------------------------------------


def messages(past: Sequence[Exchange], tokenizer: Tokenizer, codec: AudioCodec | None) -> list[Message]:
    """Two messages per turn, with the delivered part of the answer."""
    out = []
    for exchange in past:
        turn = exchange.turn
        task, clip, codes = find_task(turn.task), exchange.clip, turn.codes
        if task.question == "audio":
            seconds = 0.0 if clip is None else len(clip) / SAMPLE_RATE
            out.append(Message("user", None, round(seconds, 3), audio=clip, task=task.name))
        else:
            ids = tuple(turn.question)
            out.append(Message("user", tokenizer.decode(ids), tokens=ids, task=task.name))
        seconds = 0.0 if codes is None or codec is None else codes.shape[1] / codec.frame_rate
        said = None if turn.text is None else tuple(turn.text)
        text = None if said is None else tokenizer.decode(said)
        out.append(Message("assistant", text, round(seconds, 3), codes=codes, tokens=said, task=task.name, cut=turn.cut))
    return out


# --- messages as a session's past -------------------------------------------------------------------------------------


def read_history(history: History | None, model: SpeechModel, tokenizer: Tokenizer, codec: AudioCodec | None = None) -> Past:
    """Reads the history that a session is to start with, as messages or from a file. UserError: roles that do not alternate,
    an empty message, ids or codes of another layout, sound of an answer without a codec that can encode it, or a bad file
    (see `omni.generate.history`)."""
    if history is None:
        return (), 0
    if isinstance(history, (str, os.PathLike)):
        return load_conversation(Path(history), model, tokenizer)
    read = [_message(message, number) for number, message in enumerate(history, 1)]
    for number, message in enumerate(read, 1):
        wanted = ROLES[1 - number % 2]
        if message.role == "system":  # type: ignore[comparison-overlap]
            raise UserError(f"history: message {number} is of role 'system'; leave it out, and give its text as system=...")
        if message.role != wanted:
            raise UserError(
                f"history: message {number} is of role {message.role!r}, but questions ('user') and answers ('assistant') take "
                f"turns, and {wanted!r} comes there"
            )
    if len(read) % 2:
        raise UserError("history: the last message is a question without its answer; leave it out, and ask it")
    turns = [_turn(read[i], read[i + 1], i + 1, model, tokenizer, codec) for i in range(0, len(read), 2)]
    return turns, len(turns)


def _message(message: Message | Mapping[str, Any], number: int) -> Message:
    """Reads one message, its sound in any form; UserError where it has no content, or several sounds."""
    if isinstance(message, Message):
        return message
    texts: list[str] = []
    sounds: list[Any] = []
    content = message.get("content")
    if isinstance(content, str):
        texts.append(content)
    elif isinstance(content, (list, tuple)) and content and all(isinstance(p, Mapping) and "type" in p for p in content):
        for part in content:
            form = part["type"]
            value = next((part[key] for key in (form, "audio", "path", "text") if part.get(key) is not None), None)
            if form not in ("text", "audio") or value is None:
                problem = f"has a part of type {form!r} that is no text and no audio; leave it out"
                raise UserError(f"history: message {number} {problem}")
            (texts if form == "text" else sounds).append(value)
    elif content is not None:
        sounds.append(content)
    if not (texts or sounds):
        raise UserError(f"history: message {number} has no content; give a text or sound")
    if len(sounds) > 1:
        raise UserError(f"history: message {number} has {len(sounds)} sounds; join them into one")
    return Message(message["role"], "".join(map(str, texts)) if texts else None, audio=sounds[0] if sounds else None)


def _turn(
    question: Message, reply: Message, number: int, model: SpeechModel, tokenizer: Tokenizer, codec: AudioCodec | None
) -> Asked:
    """Joins a question and its answer as one turn."""
    codes = reply.codes
    if codes is None and reply.audio is not None:
        codes = _encode(reply.audio, number + 1, codec)
    spoken = question.audio is not None
    if spoken and question.text is not None:
        raise UserError(f"history: message {number} is a question of text and sound; give one of them")
    silent = "A2" if spoken or reply.text is not None else "A1"  # T1A1 alone answers in sound without text
    usual = f"{'A' if spoken else 'T'}1{silent if codes is not None else 'T2'}"
    name = reply.task or question.task or usual
    named = (find_task(name).question == "audio") == spoken  # else a text would be read as a path
    task = model.config.answers(find_task(name if named else usual))
    try:
        asked = read_question(question.text or "" if question.audio is None else question.audio, task, model.config, tokenizer)
        if question.tokens is not None and not spoken:
            ids = _ids(question.text or "", question.tokens, tokenizer)
            asked = replace(asked, turn=replace(asked.turn, question=ids))
        if task.audio:
            codes = torch.zeros(model.layout.n_audio, 0, dtype=torch.long) if codes is None else codes.cpu().long()
            model.layout.check_codes(codes)
    except UserError as error:
        raise UserError(f"history: message {number}: {error}") from error
    text = _ids(reply.text or "", reply.tokens, tokenizer) if task.text else None
    return replace(asked, turn=replace(asked.turn, text=text, codes=codes if task.audio else None, cut=reply.cut))


def _ids(text: str, tokens: tuple[int, ...] | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The message's own ids, where this tokenizer decodes them to its text; else the tokenizer's ids of the text."""
    if tokens is not None and tokenizer.decode(tokens) == text:
        return tokens
    return tuple(tokenizer.encode(text))


def _encode(sound: Any, number: int, codec: AudioCodec | None) -> Tensor:
    """Encodes an answer's sound, in any form that a question has, as frames [A, F]; samples without a rate have the codec's."""
    if codec is None:
        raise UserError(f"history: message {number} has sound, but the model has no codec to encode it; give its text alone")
    try:
        samples, rate = unwrap(sound, codec.sample_rate, "the answer")
        return codec.encode(read_sound(samples, rate, codec.sample_rate, name="the answer"))
    except UserError as error:
        raise UserError(f"history: message {number}: {error}") from error


FORMAT_VERSION = 1

KEY = "conversation"


def save_conversation(
    path: str | os.PathLike[str], past: Sequence[Exchange], asked: int, model: SpeechModel, tokenizer: Tokenizer
) -> Path:
    """Write a conversation; the file appears when it is whole. UserError: the place cannot be written; what was there before
    stays."""
    tensors: dict[str, Tensor] = {}
    turns = []
    for number, exchange in enumerate(past):
        turn = exchange.turn
        parts = {"audio": exchange.clip, "codes": turn.codes, "question": turn.question or None, "text": turn.text}
        for name, part in parts.items():
            if part is not None:
                tensor = part if isinstance(part, Tensor) else torch.tensor(tuple(part), dtype=torch.long)
                tensors[f"turn.{number}.{name}"] = tensor.clone(memory_format=torch.contiguous_format)
        texts = {"question": turn.question, "answer": turn.text}
        said = {k: tokenizer.decode(ids) for k, ids in texts.items() if ids}
        turns.append({"task": find_task(turn.task).name, "cut": turn.cut, **said})
    head = {"format": FORMAT_VERSION, **_facts_of(model), "asked": asked, "turns": turns}
    data = save(tensors, {KEY: json.dumps(head, ensure_ascii=False)})
    try:
        write_whole(path, data)
    except OSError as error:
        raise UserError(
            f"the conversation cannot be written to {os.fspath(path)!r} ({error.strerror or error}); name a file in a folder "
            "that is there and can be written"
        ) from error
    return Path(path)


def load_conversation(path: Path, model: SpeechModel, tokenizer: Tokenizer) -> Past:
    """Read a conversation. UserError: there is no such file, it is no conversation or of another version, of a model with
    another layout, codec or tokenizer, or its contents contradict each other."""
    head, tensors = _read(path)
    if head.get("format") != FORMAT_VERSION:
        raise UserError(f"{path}: format {head.get('format')!r} is unknown; this version reads format {FORMAT_VERSION}")
    for name, own in _facts_of(model).items():
        if head.get(name) != own:
            other = f"codec {head.get(name)!r}, and this model's codec is {own!r}" if name == "codec" else f"another {name}"
            raise UserError(f"{path} is a conversation with a model of {other}; go on with that model")
    try:
        turns = [_saved_turn(number, facts, tensors, model, tokenizer) for number, facts in enumerate(head["turns"])]
        return turns, max(len(turns), int(head["asked"]))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} does not fit together ({error!r}); save the conversation again") from error


def _saved_turn(
    number: int, facts: dict[str, Any], tensors: dict[str, Tensor], model: SpeechModel, tokenizer: Tokenizer
) -> Any:
    """Reads one turn with its answer, with the checks of a question."""
    own = {name: tensors.get(f"turn.{number}.{name}") for name in ("audio", "question", "text", "codes")}
    task, layout = TASKS[facts["task"]], model.layout
    ids = {name: None if (t := own[name]) is None else tuple(t.long().tolist()) for name in ("question", "text")}
    for name, said in (("question", facts.get("question", "")), ("text", facts.get("answer", ""))):
        tokens = ids[name] or ()
        if any(not 0 <= token < layout.text.vocabulary for token in tokens) or tokenizer.decode(tokens) != said:
            raise UserError(f"turn {number + 1}: its ids are another tokenizer's; go on with the model of the conversation")
    question: Any = own["audio"] if task.question == "audio" else facts["question"]
    if question is None:
        raise UserError(f"turn {number + 1}: the sound of its question is missing; save the conversation again")
    asked = read_question(question, task, model.config, tokenizer)
    turn = asked.turn if task.question == "audio" else replace(asked.turn, question=ids["question"] or ())
    text, codes = ids["text"], own["codes"]
    if (text is None) is task.text or (codes is None) is task.audio:
        raise UserError(f"turn {number + 1} is {task.name}, but its answer is of another kind; save the conversation again")
    if codes is not None:
        layout.check_codes(codes)
    return replace(asked, turn=replace(turn, text=text, codes=codes, cut=facts.get("cut") is True))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON of the header and the tensors; UserError where the file is no conversation."""
    if not path.is_file():
        raise UserError(f"{path} is no file; give the file of a conversation that session.save wrote")
    try:
        with safe_open(path, framework="pt") as file:
            head = json.loads((file.metadata() or {}).get(KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} is no saved conversation, or damaged ({error}); give what session.save wrote") from error
    if not isinstance(head, dict):
        raise UserError(f"{path} is no saved conversation; give what session.save wrote")
    return head, tensors


def _facts_of(model: SpeechModel) -> dict[str, Any]:
    """Properties of the model that a conversation depends on, as plain data."""
    layout = json.loads(json.dumps(asdict(model.layout)))
    return {"codec": model.config.codec, "layout": layout}
