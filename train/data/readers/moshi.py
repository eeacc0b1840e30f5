"""Reads moshi-finetune: conversations on two channels, cut into turns by the times of their words.

A line of JSON for each recording, `{"path", "duration"}`: a stereo file with the model on the left (channel 0) and the user
on the right (1), and beside it a `.json` of the same name, `{"alignments": [[word, [start s, end s], "SPEAKER_MAIN"], ...]}`.
SPEAKER_MAIN is the model; any other speaker is the user. Source: the data section of kyutai-labs/moshi-finetune's README and
its annotate.py, which writes the model's words only.

A recording becomes one row. An utterance is a run of one speaker's words with less than `ReaderOptions.pause` seconds between
them. A turn consists of what the user says, then what the model says until the user starts again; where the alignment lacks
the user's words, the user's side is the right channel between two utterances of the model, and utterances with silence between
them on that channel are one answer.
Each side is cut from its own channel, and the words stay with the turn (`RowTurn.words`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omni.errors import UserError
from train.data.readers.containers import TAR
from train.data.readers.contract import ReaderOptions
from train.data.readers.files import Files, cut, header
from train.data.readers.source import RecordReader, check_text, make_row, number, text, to_sides
from train.data.rows.row import Row, RowTurn, Sound, Word

MODEL, USER = 0, 1  # channels

_LATE = 0.1  # seconds by which a word may end after the recording: recognisers round
_DISAGREE = 0.5  # seconds by which the duration in the list may differ from the file's
_SILENCE = 10 ** (-50 / 20)  # root mean square of a segment in which nobody speaks: -50 dB of full scale


class Utterance(NamedTuple):
    """A speaker's words without a pause between them. Times in seconds of the recording."""

    who: str
    start: float
    end: float
    words: tuple[Word, ...]


def moshi_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one recording; UserError where it, or its alignment, is broken."""
    name = text(data, "path", needed=True)
    path = files.file(name)
    info = header(path)
    if info.channels != 2:
        raise UserError(
            f"{name!r} has {info.channels} channels, not 2 (left the model, right the user): it cannot be cut into turns"
        )
    promised = number(data, "duration", info.seconds)
    if abs(promised - info.seconds) > _DISAGREE:
        raise UserError(
            f"{name!r} lasts {info.seconds:.2f} s, the list says {promised:.2f} s: it is another file, or cut short"
        )
    words = read_words(files.file(str(Path(name).with_suffix(".json"))), info.seconds)
    utterances = to_utterances(words, options.pause)
    if not any(word.who == "user" for word in words):
        utterances = _with_silent_user(utterances, path, info.seconds)
    said = to_sides(utterances, lambda utterance: utterance.who == "model")
    turns = [_turn(*sides, name=name, files=files) for sides in said]
    return make_row(turns, options, "moshi", where, id=str(Path(name).with_suffix("")))


def read_words(path: Path, seconds: float) -> list[Word]:
    """Read the words of an alignment in the order of their starts, times in seconds of the recording, which lasts `seconds`.
    UserError for a file that is no alignment, and words that end before they start or lie beyond the recording."""
    try:
        alignments = json.loads(path.read_text("utf-8"))["alignments"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"alignment {path} is no JSON with a list of alignments: make it again") from error
    words = []
    for index, entry in enumerate(alignments if isinstance(alignments, list) else [alignments]):
        match entry:
            case [str(word), [int() | float() as start, int() | float() as end], str(speaker)]:
                pass
            case _:
                raise UserError(f"alignment {path} word {index} is not [word, [start, end], speaker]: make it again")
        if not 0 <= start <= end < float("inf"):
            raise UserError(f"alignment {path} word {index} ({word!r}) goes from {start} to {end} s: make it again")
        if end > seconds + _LATE:
            raise UserError(f"alignment {path} word {index} ({word!r}) ends at {end:.2f} s, the recording at {seconds:.2f} s")
        check_text(word, f"alignment {path} word {index}")
        who = "model" if speaker == "SPEAKER_MAIN" else "user"
        words.append(Word(word.strip(), min(float(start), seconds), min(float(end), seconds), who))
    if not words:
        raise UserError(f"alignment {path} has no words: drop the recording, or make it again")
    return sorted(words, key=lambda word: word.start)


def to_utterances(words: Sequence[Word], pause: float) -> list[Utterance]:
    """Group words, sorted by start, into utterances, sorted by start; `pause` seconds of silence end one."""
    runs: list[list[Word]] = []
    latest: dict[str, list[Word]] = {}
    for word in words:
        run = latest.get(word.who)
        if run is None or word.start - max(earlier.end for earlier in run) >= pause:
            run = latest[word.who] = []
            runs.append(run)
        run.append(word)
    return [Utterance(run[0].who, run[0].start, max(word.end for word in run), tuple(run)) for run in runs]


def _with_silent_user(utterances: Sequence[Utterance], path: Path, seconds: float) -> list[Utterance]:
    """Add, between the model's utterances, what sounds on the user's channel, as utterances without words."""
    out: list[Utterance] = []
    before = 0.0
    for utterance in (*utterances, Utterance("model", seconds, seconds, ())):
        if utterance.start - before >= 0.02:
            samples = cut(path, before, utterance.start, USER).samples
            if samples is not None and float(samples.square().mean().sqrt()) > _SILENCE:
                out.append(Utterance("user", before, utterance.start, ()))
        out.append(utterance)
        before = utterance.end
    return out[:-1]


def _turn(asked: Sequence[Utterance], answered: Sequence[Utterance], name: str, files: Files) -> RowTurn:
    (question, question_audio, words, start), (answer, answer_audio, said, later) = (
        _side(side, name, files, channel) for side, channel in ((asked, USER), (answered, MODEL))
    )
    return RowTurn(question, question_audio, answer, answer_audio, None, (*words, *said), start, later)


def _side(
    utterances: Sequence[Utterance], name: str, files: Files, channel: int
) -> tuple[str, Sound | None, tuple[Word, ...], float]:
    """Text, sound, words (from the start of the sound) and start of one side of a turn."""
    if not utterances:
        return "", None, (), 0.0
    start, end = utterances[0].start, max(utterance.end for utterance in utterances)
    words = [word for utterance in utterances for word in utterance.words]
    moved = tuple(Word(word.text, word.start - start, word.end - start, word.who) for word in words)
    said = " ".join(word.text for word in words if word.text)
    return said, files.cut(name, start, end, channel), moved, start


MOSHI = RecordReader(
    "moshi",
    "moshi-finetune: JSON lines of path and duration, stereo recordings, .json alignments beside them",
    moshi_row,
    (".jsonl", TAR),
    (frozenset({"path", "duration"}),),
    also=lambda record: not {"text", "sentence", "question_text"} & record.keys(),
    notice="the left channel is taken to be the model, the right one the user",
)
