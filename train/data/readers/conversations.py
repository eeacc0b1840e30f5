"""Reads conversations of messages and single questions with answers, written, spoken or as codes.

Chats are `{"messages": [{"role": "system" | "user" | "assistant", "content": text}]}`, as OpenAI's fine-tuning, TRL and
LLaMA-Factory have them (`conversations`, and `from: human | gpt` with `value`, as ShareGPT has it, are taken too). Questions
and answers become turns of one row, and system messages before the first question its system message (later ones are left out).
A `content` may also be a list of parts. Recordings are read wherever `files` knows them.

Alpaca (tatsu-lab/stanford_alpaca) is `instruction, input, output`: an `input` that is not empty is joined to the instruction by
a blank line. LLaMA-Factory's `history [[question, answer]]` comes before it as turns of their own; its `system` is the row's,
and its recordings are read where texts have tags of them.

LUCY (VITA-MLLM/LUCY, the data section of its README) is `conversations [{role, content, wavpath, codec, speaker}]`. A `.snac`
file has seven integers a frame, level by level: c0 | c1 c1 | c2 c2 c2 c2 (our `levels`), which is not the order of the model's
streams. The codes of the user's recordings are not read.

LLaMA-Omni and VocalNet are `id, speech, conversations [{from: human | gpt, value}]`. `speech` is the recording of the question,
or a list with one for each human message. A human value with `<speech>` in it is an instruction about the recording ("Please
directly answer ..."), not what is said there: it is no question text. `units` are those of the answers: a path to an .npy file,
a list of integers or their text, or a list of paths, one for each answer. Their codec is not written anywhere (CosyVoice 2 for
VocalNet and LLaMA-Omni 2, HuBERT clusters for LLaMA-Omni), so `ReaderOptions.codec` must say it.

VoiceAssistant-400K (gpt-omni/VoiceAssistant-400K, Parquet) is one question and answer a row, with earlier turns inside the
question's text: `split_name, index, round, question, question_audio {bytes, path}, answer, answer_snac`, the latter
`# t0 t1 t2 t3 t4 t5 t6 # ...` with a frame's codes as c0 c1 c2 c2 c1 c2 c2 (our `streams`). SLAM-Omni is the same with
`answer_cosyvoice_speech_token`; as JSON lines `key, source_wav, source_text, target_token, target_text`, tokens CosyVoice's,
one stream at 50 a second. A later round's question starts with the earlier ones, `USER: ... ASSISTANT: ... <USER>: ...`: those
become turns of text, and the recording belongs to the last.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from omni.errors import UserError
from train.data.readers.codes import check_duration, load_array, read_codes
from train.data.readers.containers import ENDINGS, LISTS, TAR
from train.data.readers.contract import ReaderOptions
from train.data.readers.files import Files, Said, listed, present, read_said, recordings_of, seconds, tags
from train.data.readers.source import RecordReader, check_text, items, make_row, text
from train.data.rows.row import Codes, Row, RowTurn, Sound

_ASKING, _ANSWERING, _SYSTEM = ("user", "human"), ("assistant", "gpt"), ("system", "developer")

Message = Mapping[str, Any]
ReadCodes = Callable[[Mapping[str, Any], Files, ReaderOptions, list[Message]], Sequence[Codes | None]]
"""Reads the codes of a record's answers."""


def _speaks(messages: Any, *names: str) -> bool:
    """True for a list of messages with these fields."""
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, Mapping) and set(names) <= first.keys()


def conversation_row(
    data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions, format: str, codes: ReadCodes | None = None
) -> Row:
    """Make the row of one conversation; UserError where it is broken. Its system message is the texts of those before the first
    question, joined by blank lines, or else the record's field `system`."""
    messages = items(data, "messages" if data.get("messages") is not None or "conversations" not in data else "conversations")
    turns = turns_of(data, messages, files, partial(codes, data, files, options) if codes else None)
    first = itertools.takewhile(lambda message: _who(message) in _SYSTEM, messages)
    system = "\n\n".join(filter(None, (_said(message).text for message in first))) or text(data, "system")
    return make_row(turns, options, format, where, id=text(data, "id", "prompt_id"), system=system)


def turns_of(
    data: Mapping[str, Any],
    messages: Sequence[Message],
    files: Files,
    codes: Callable[[list[Message]], Sequence[Codes | None]] | None = None,
) -> list[RowTurn]:
    """Make turns of a record's messages and recordings; system messages are left out. `codes` gives those of answers.
    Recordings of the record belong to the tags in the texts, in their order; without tags, to the questions. UserError where
    they are not as many, where a message says nothing, or is by an unknown speaker, and where sides do not alternate."""
    sides = _sides(messages)
    coded = codes([answer.message for answer in sides[1::2]]) if codes else [None] * len(sides)
    parts: list[tuple[str, Sound | None, Codes | None]] = []
    for number, (said, recording) in enumerate(zip(sides, _assigned(recordings_of(data), sides), strict=True)):
        parts.append((said.text, files.sound(recording), coded[number // 2] if number % 2 else None))
        if not any(parts[-1]):
            raise UserError(f"{_noun(number)} has no text, and there is no recording of it: drop the row")
    pairs = itertools.zip_longest(parts[::2], parts[1::2], fillvalue=("", None, None))
    return [RowTurn(*question[:2], *answer) for question, answer in pairs]


def _noun(side: int) -> str:
    return f"{'answer' if side % 2 else 'question'} {side // 2}"


def _who(message: Message) -> str:
    role = message.get("role", message.get("from"))
    return role if role in _ASKING + _ANSWERING + _SYSTEM else text(message, "role", "from", needed=True).lower()


def _said(message: Message) -> Said:
    try:
        said = read_said(message)
        check_text(said.text, "that")
    except UserError as error:
        raise UserError(f"a message of {_who(message)!r} {error}") from None
    return said


def _sides(messages: Sequence[Message]) -> list[Said]:
    """Questions and answers in turn. A recording and the texts of the same side that stand beside it are one."""
    sides: list[Said] = []
    for number, message in enumerate(messages):
        who = _who(message)
        if who in _SYSTEM:
            continue
        said = _said(message)
        due, last = (_ANSWERING, _ASKING) if len(sides) % 2 else (_ASKING, _ANSWERING)
        if who in due:
            sides.append(said)
        elif sides and who in last and (sides[-1].recordings or said.recordings):
            before = sides[-1]
            sides[-1] = Said(f"{before.text}\n{said.text}", [*before.recordings, *said.recordings], before.message)
        else:
            raise UserError(
                f"message {number} is from {who!r}, not {due[0]!r} (or {due[1]!r}): questions and answers must alternate; "
                "fix or drop the row"
            )
    return sides


def _assigned(value: Any, sides: Sequence[Said]) -> list[Any]:
    """The recording of each side, None for none; UserError where they are not as many as belong there."""
    held = [list(said.recordings) for said in sides]
    wanted = [0 if said.recordings else tags(said.text) for said in sides]
    recordings = listed(value)
    if any(wanted):
        named = [recording for recording in recordings if present(recording)]
        if len(named) != sum(wanted):
            raise UserError(f"its texts have tags (<audio>) of {sum(wanted)} recordings, {len(named)} are there")
        for own, count in zip(held, wanted, strict=True):
            own += named[:count]
            del named[:count]
    elif recordings:
        questions = held[::2]
        if len(recordings) not in (1, len(questions)):
            raise UserError(f"has {len(recordings)} recordings for {len(questions)} questions: fix the row")
        for own, recording in zip(questions[-len(recordings) :], recordings, strict=True):
            own += [recording] if present(recording) else []
    for number, own in enumerate(held):
        if len(own) > 1:
            raise UserError(f"{_noun(number)} has {len(own)} recordings, not one: join them")
    return [own[0] if own else None for own in held]


def alpaca_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one instruction; UserError where it is broken."""
    asked, context, answered = text(data, "instruction", needed=True), text(data, "input"), text(data, "output", needed=True)
    if not asked or not answered:
        raise UserError(f"has no {'output' if asked else 'instruction'}: drop the row")
    said: list[str] = []
    earlier = data.get("history") or []
    for entry in earlier if isinstance(earlier, list) else [None]:
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(part, str) and part.strip() for part in entry):
            raise UserError("field 'history' is not a list of [question, answer]: fix the row")
        said += (check_text(part.strip(), "field 'history'") for part in entry)
    said += [f"{asked}\n\n{context}" if context else asked, answered]
    if recordings_of(data) and not any(map(tags, said)):
        raise UserError(
            "has a recording beside its texts, and none has a tag of it, such as <audio>: drop the row, or write tables with "
            "question_audio, question_text, answer_text (--read.format table)"
        )
    messages = [{"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(said)]
    turns = turns_of(data, messages, files)
    return make_row(turns, options, "alpaca", where, id=text(data, "id"), system=text(data, "system"))


CHAT = RecordReader(
    "chat",
    'written chats: JSON or Parquet of {"messages": [{"role", "content"}]}, also of several turns',
    partial(conversation_row, format="chat"),
    (*LISTS, TAR),
    (frozenset({"messages"}),),
    also=lambda record: _speaks(record["messages"], "role", "content"),
    notice="system messages after the first question are left out",
)

ALPACA = RecordReader(
    "alpaca",
    "written instructions as Alpaca has them: JSON, CSV, TSV or Parquet of instruction, input, output",
    alpaca_row,
    ENDINGS,
    (frozenset({"instruction", "output"}),),
    also=lambda record: not {"question_audio", "question_text", "answer_audio", "answer_text"} & record.keys(),
    notice="an input follows its instruction after a blank line",
)


def lucy_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one conversation; UserError where it is broken."""
    row = conversation_row(data, where, files, options, "lucy", _snac_codes)
    for turn in row.turns:
        check_duration(turn.answer_codes, seconds(turn.answer_audio))
    return row


def _snac_codes(data: Mapping[str, Any], files: Files, options: ReaderOptions, answers: list[Message]) -> list[Codes | None]:
    """Read the codes of the files that answers name."""
    codes = []
    for name in (text(answer, "codec") for answer in answers):
        path = files.file(name, "codes") if name else None
        try:
            codes.append(read_codes(path and path.read_text("utf-8"), "snac", "levels", options))
        except ValueError as error:  # no text, too
            raise UserError(f"codes {name!r}: {error}") from error
    return codes


LUCY = RecordReader(
    "lucy",
    "LUCY: JSON of conversations with role, content, wavpath and .snac files; the same of text alone",
    lucy_row,
    (".json", ".jsonl", TAR),
    (frozenset({"conversations"}),),
    also=lambda record: _speaks(record["conversations"], "role", "content"),
    notice="SNAC codes are taken to be in the order {order} (c0 | c1 c1 | c2 c2 c2 c2 as the format documents it); "
    "system messages after the first question are left out",
    order="levels",
)


_UNITS = ("units", "unit", "tgt_units", "tgt_unit")


def _unit_codes(data: Mapping[str, Any], files: Files, options: ReaderOptions, answers: list[Message]) -> list[Codes | None]:
    """Read the units of answers. A list of integers, or what is no list, belongs to the last one."""
    units = next((data[name] for name in _UNITS if data.get(name) is not None), None)
    if not isinstance(units, list) or all(isinstance(element, int) for element in units):
        units = ([None] * len(answers) + [units or None])[-len(answers) :] if answers else []
    if len(units) != len(answers):
        raise UserError(f"units has {len(units)} entries for {len(answers)} answers: fix the row")
    arrays = (load_array(files.file(u, "units")) if isinstance(u, str) and u.endswith(".npy") else u for u in units)
    return [None if array is None else read_codes(array, "", "", options) for array in arrays]


LLAMA_OMNI = RecordReader(
    "llama-omni",
    "LLaMA-Omni, VocalNet: JSON of speech and conversations (from human, gpt), units in .npy; the same of text alone",
    partial(conversation_row, format="llama-omni", codes=_unit_codes),
    (".json", ".jsonl", TAR),
    (frozenset({"conversations"}),),
    also=lambda record: _speaks(record["conversations"], "from", "value"),
    notice="units are taken to be of the codec {codec}; text beside <speech> is not kept; system messages "
    "after the first question are left out",
    codec="that --read.codec names",
)


_SPEAKER = re.compile(r"(?:^|\s)<?(USER|ASSISTANT)>?:\s*")

_CODES = {"answer_snac": "snac", "answer_cosyvoice_speech_token": "cosyvoice", "target_token": "cosyvoice"}
"""Fields with codes, and their codecs."""


def assistant_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions, format: str) -> Row:
    """Make the row of one record of either `format`; UserError where it is broken."""
    turns = history(text(data, "question", "source_text", needed=True))
    filled = [field for field in _CODES if data.get(field)]
    wanted = (field for field in filled if options.codec.startswith(_CODES[field]))  # or else the first
    field = next(wanted, filled[0] if filled else "")
    turn = replace(
        turns[-1],
        question_audio=files.sound(data.get("question_audio") or data.get("source_wav")),
        answer_text=text(data, "answer", "target_text", needed=True),
        answer_audio=files.sound(data.get("answer_audio") or data.get("target_wav")),
        answer_codes=read_codes(data[field], _CODES[field], "streams", options) if field else None,
    )
    check_duration(turn.answer_codes, seconds(turn.answer_audio))
    name = text(data, "key") or "-".join(filter(None, (text(data, part) for part in ("split_name", "index", "round"))))
    if not (turn.question_text or turn.question_audio):
        raise UserError("has no question, neither as text nor as a recording: drop the row")
    return make_row([*turns[:-1], turn], options, format, where, id=name)


def history(question: str) -> list[RowTurn]:
    """Split a question that starts with `USER:` or `<USER>:` into turns (the last has no answer yet); any other is one turn.
    UserError where speakers do not alternate, from USER to USER."""
    if not (start := _SPEAKER.match(question)) or start[1] != "USER":
        return [RowTurn(question_text=question)]
    parts = _SPEAKER.split(question)[1:]  # USER, what was said, ASSISTANT, ...
    speakers, said = parts[::2], [part.strip() for part in parts[1::2]]
    if len(speakers) % 2 == 0 or any(name != ("USER", "ASSISTANT")[i % 2] for i, name in enumerate(speakers)):
        raise UserError(
            f"its question's history does not alternate from USER to USER: {', '.join(speakers)}; fix or drop the row"
        )
    answers = [*said[1::2], ""]
    return [RowTurn(question_text=asked, answer_text=answer) for asked, answer in zip(said[::2], answers, strict=True)]


VOICE_ASSISTANT = RecordReader(
    "voiceassistant",
    "VoiceAssistant-400K: Parquet with question_audio and answer_snac",
    partial(assistant_row, format="voiceassistant"),
    (".parquet", TAR),
    (frozenset({"question", "answer", "answer_snac"}),),
    notice="SNAC codes are taken to be in the order {order} (c0 c1 c2 c2 c1 c2 c2 as the format documents it)",
    order="streams",
)

SLAM_OMNI = RecordReader(
    "slam-omni",
    "SLAM-Omni: Parquet with answer_cosyvoice_speech_token, or JSON lines with source_wav, target_token",
    partial(assistant_row, format="slam-omni"),
    (".parquet", ".jsonl", TAR),
    (frozenset({"question", "answer", "answer_cosyvoice_speech_token"}), frozenset({"source_text", "target_text"})),
    notice="answers' codes are taken to be of the codec {codec}, which only a model of that codec speaks",
    codec="cosyvoice",
)
