"""Tasks as rows of a table: the question's kind, the answer's streams, and the streams that are trained.

A task lays out a prompt and says which streams answer it; training and serving build their columns here, so that a training
example's prompt is the serving prompt, bit for bit (`example() = prompt() + answer`). The prompts are mini-omni's
(gpt-omni/mini-omni @ 26c31d5, `inference.py`):

    speech in   input | T x pad, where the T encoder features are   | end | answer      on every stream
    text in     input | the question's tokens                       | end | answer      on text; pad, ..., answer on audio

A system message, an instruction for all answers of a conversation, comes before its first question. It has the markers of a
written question, but no `answer` after its end:

    system      input | the message's tokens                        | end            on text; pad on audio

A layout with a language model's own chat format (`Layout.chat`) has the ids of that around question and system message, and a
marker other than `answer` before the question; the audio streams have pad there, and their marker in the last column.

The text stream's marker is `asr` where the question is to be transcribed; a stream that does not answer has pad in the last
column, where the others have their marker. `register_task` adds rows, with markers of their own.

| task | question | answer        | trained: text | trained: audio | what it is                       |
|------|----------|---------------|---------------|----------------|----------------------------------|
| A1T1 | speech   | text (`asr`)  | yes           | -              | transcription                    |
| A1T2 | speech   | text          | yes           | -              | written answer to speech         |
| A1A2 | speech   | text + speech | yes           | yes            | spoken answer to speech          |
| T1A1 | text     | speech        | -             | yes            | reading aloud                    |
| T1A2 | text     | text + speech | yes           | yes            | spoken answer to text            |
| T1T2 | text     | text          | yes           | -              | written answer to text           |

Dimensions: K streams, C columns, N features of a clip after the projector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from omni.errors import UserError
from omni.layout import IGNORE, SPECIALS, Layout
from omni.plugins import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Task:
    """One row of the table.

    Attributes:
        question: `audio` or `text`.
        text, audio: whether the answer is written, and whether it is spoken (these streams are trained).
        marker: the text stream's last prompt id, where text answers: `answer`, `asr`, or one that `register_task` adds.
        writes: source of the text: the row's answer, or its question (a transcription).
    """

    name: str
    question: Literal["audio", "text"]
    text: bool
    audio: bool
    marker: str = "answer"
    writes: Literal["answer", "question"] = "answer"

    def trained(self, layout: Layout) -> tuple[bool, ...]:
        """Whether each stream is supervised, in the layout's order."""
        return (*(self.audio and s.role == "predicted" for s in layout.audio), self.text)


TASKS: Registry[Task] = Registry("task")
"""Tasks by name; a task's number in batches and tables is its place here."""


def register_task(task: Task, offset: int | None = None) -> Task:
    """Adds a task.

        register_task(Task("A1T3", "audio", text=True, audio=False, marker="translate"), offset=5)

    Args:
        offset: of a new marker among the text stream's special ids, from 5: the model's id for it, so keep it for good.

    Raises:
        UserError: the name is taken, the marker is new and has no offset, or another marker has that offset.
    """
    markers = SPECIALS["text"]
    if task.marker not in markers:
        if offset is None or offset < 5:
            raise UserError(f"task {task.name}: its marker {task.marker!r} is new; give an offset of it, from 5")
        taken = next((name for name, other in markers.items() if other == offset), None)
        if taken is not None:
            raise UserError(
                f"task {task.name}: offset {offset} of its marker {task.marker!r} is that of {taken!r}; give another"
            )
    elif offset not in (None, markers[task.marker]):
        raise UserError(
            f"task {task.name}: the marker {task.marker!r} has offset {markers[task.marker]}, not {offset}; leave it out"
        )
    TASKS.add(task.name, task)
    if offset is not None:
        markers[task.marker] = offset
    return task


for _task in (
    Task("A1T1", "audio", text=True, audio=False, marker="asr", writes="question"),
    Task("A1T2", "audio", text=True, audio=False),
    Task("A1A2", "audio", text=True, audio=True),
    Task("T1A1", "text", text=False, audio=True),
    Task("T1A2", "text", text=True, audio=True),
    Task("T1T2", "text", text=True, audio=False),
):
    register_task(_task)


def find_task(name: str | Task, where: str = "") -> Task:
    """The task of that name; UserError with the closest names where there is none, after the option or key it came from."""
    return name if isinstance(name, Task) else TASKS.find(name, where)


def find_writer(task: Task) -> Task:
    """The task with the same kind of question that is answered in text only, by the same marker where there is one."""
    writers = [
        t for t in TASKS.values() if (t.question, t.writes, t.text, t.audio) == (task.question, task.writes, True, False)
    ]
    return next((t for t in writers if t.marker == task.marker), writers[0])


@dataclass(frozen=True)
class Columns:
    """Consecutive columns of a sequence, with their targets and features.

    Attributes:
        tokens: [K, C] ids local to each stream.
        targets: [K, C]; `targets[:, c]` is to be predicted from column c, `IGNORE` where nothing is trained.
        feature_index: [C]; which encoder feature the column takes, counted over all clips of the piece, -1 for none.
        features: number of features of each clip, in order.
    """

    tokens: Tensor
    targets: Tensor
    feature_index: Tensor
    features: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.tokens.shape[1]

    def __getitem__(self, kept: slice | Tensor) -> Columns:
        """Some of the columns, of the same clips."""
        return Columns(self.tokens[:, kept], self.targets[:, kept], self.feature_index[kept], self.features)


@dataclass(frozen=True)
class Turn:
    """One question and its answer, as ids.

    Attributes:
        task: the task or its name.
        features: number of encoder features of the spoken question (speech in).
        question: token ids of the written question (text in).
        text: token ids of the answer, without an end.
        codes: frames of the answer, [A, F].
        system: token ids of the system message before a conversation's first question; None for later turns.
        cut: text and codes are the part that was heard of an interrupted answer: its columns are those of an answer that ended
            there (`omni/layout.py` draws them), but its ends are not trained.
    """

    task: Task | str
    features: int = 0
    question: Sequence[int] = ()
    text: Sequence[int] | None = None
    codes: Tensor | None = None
    system: Sequence[int] | None = ()
    cut: bool = False


def written(layout: Layout, ids: Sequence[int]) -> Columns:
    """Columns of ids of the text stream that are read, and not trained."""
    import torch

    tokens = layout.ids("pad")[:, None].repeat(1, len(ids))
    tokens[layout.n_audio] = torch.as_tensor(ids, dtype=torch.long)
    return Columns(tokens, torch.full_like(tokens, IGNORE), torch.full((len(ids),), -1))


def system_message(layout: Layout, ids: Sequence[int]) -> Columns:
    """The columns of a system message, which come before the first question's, or those that a conversation without one begins
    with. UserError: the layout's chat format has none."""
    chat, text = layout.chat, layout.text
    if not len(ids):
        return written(layout, chat.start if chat is not None else ())
    if chat is None:
        return written(layout, [text.special("input"), *ids, text.special("end")])
    if chat.system is None:
        raise UserError("the model's chat format has no system message; leave it out, or put it into the question")
    return written(layout, [*chat.system[0], *ids, *chat.system[1]])


def prompt(layout: Layout, turn: Turn) -> Columns:
    """The question's columns, up to and with the column from which the answer's first is predicted; a system message first."""
    import torch

    task = find_task(turn.task)
    k, a = len(layout), layout.n_audio
    pad, end, start = layout.ids("pad"), layout.ids("end"), layout.ids("input")
    answer, chat = layout.ids(task.marker), layout.chat
    if task.question == "audio":
        if turn.features < 1:
            raise UserError(f"task {task.name} asks by speech, but the question has {turn.features} encoder features")
        body = pad[:, None].expand(k, turn.features)
        index = torch.arange(turn.features)
    else:
        if len(turn.question) == 0:
            raise UserError(f"task {task.name} asks in writing, but the question's text is empty")
        body = pad[:, None].repeat(1, len(turn.question))
        body[a] = torch.as_tensor(turn.question, dtype=torch.long)
        index = torch.full((len(turn.question),), -1)
        start, end = start.clone(), end.clone()
        start[:a] = pad[:a]
        end[:a] = pad[:a]
    active = torch.tensor([task.audio] * a + [task.text])
    last = torch.where(active, answer, pad)
    first, rest = start[:, None], torch.stack([end, last], dim=1)
    if chat is not None:
        marker = [layout.text.special(task.marker)] if task.marker != "answer" else []
        first, rest = (written(layout, ids).tokens for ids in ([*chat.question[0], *marker], chat.question[1]))
        rest[:a, -1] = last[:a]
    tokens = torch.cat([first, body, rest], dim=1)
    asked = Columns(
        tokens=tokens,
        targets=torch.full_like(tokens, IGNORE),
        feature_index=torch.cat([torch.full(first.shape[1:], -1), index, torch.full(rest.shape[1:], -1)]),
        features=(turn.features,) if task.question == "audio" else (),
    )
    return opened(layout, turn, asked)


def opened(
    layout: Layout, turn: Turn, asked: Columns, message: Callable[[Layout, tuple[int, ...]], Columns] = system_message
) -> Columns:
    """A question's columns with those that its conversation begins with, where it is the first and there are any."""
    if turn.system is None or not len(begin := message(layout, tuple(turn.system))):
        return asked
    return join([begin, asked])


def answer(layout: Layout, turn: Turn) -> Columns:
    """The answer's columns; `targets` here are the columns' own tokens where they are trained (see `join` for the shift)."""
    import torch

    task = find_task(turn.task)
    if task.text and turn.text is None:
        raise UserError(f"task {task.name} answers in writing, but the row has no answer text")
    if task.audio and turn.codes is None:
        raise UserError(f"task {task.name} answers in speech, but the row has no answer codes")
    text = torch.as_tensor(turn.text, dtype=torch.long) if task.text else None
    tokens, valid = layout.delayed(text, turn.codes if task.audio else None, cut=turn.cut)
    replied = Columns(
        tokens=tokens, targets=torch.where(valid, tokens, IGNORE), feature_index=torch.full((tokens.shape[1],), -1)
    )
    return replied if layout.chat is None else join([replied, written(layout, layout.chat.after)])


def join(pieces: Sequence[Columns]) -> Columns:
    """Joins pieces one after another; feature indices are counted over all of them. Targets stay with their columns."""
    import torch

    offset, index = 0, []
    for piece in pieces:
        own = piece.feature_index
        index.append(torch.where(own >= 0, own + offset, -1) if offset and piece.features else own)
        offset += sum(piece.features)
    return Columns(
        tokens=torch.cat([p.tokens for p in pieces], dim=1),
        targets=torch.cat([p.targets for p in pieces], dim=1),
        feature_index=torch.cat(index),
        features=tuple(n for p in pieces for n in p.features),
    )


def example(layout: Layout, turns: Sequence[Turn]) -> Columns:
    """A training example of one or more turns: prompts and answers joined, each column's target the next column's token."""
    import torch

    first, *later = turns
    whole = [first, *(replace(turn, system=None) for turn in later)]
    pieces = [piece for turn in whole for piece in (prompt(layout, turn), answer(layout, turn))]
    joined = join(pieces)
    targets = torch.full_like(joined.targets, IGNORE)
    targets[:, :-1] = joined.targets[:, 1:]
    return Columns(joined.tokens, targets, joined.feature_index, joined.features)
