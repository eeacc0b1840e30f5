"""Reads conversations of messages and single questions with answers, written, spoken or as codes.

Chats are `{"messages": [{"role": "system" | "user" | "assistant", "content": text}]}`, as OpenAI's fine-tuning, TRL and
LLaMA-Factory have them (`conversations`, and `from: human | gpt` with `value`, as ShareGPT has it, are taken too). Questions
and answers become turns of one row, and system messages before the first question its system message (later ones are left out).
A `content` may also be a list of parts. Recordings are read wherever `media` knows them.

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
from train.data.readers.files import Files, seconds
from train.data.readers.media import Said, listed, present, read_said, recordings_of, tags
from train.data.readers.source import RecordReader, check_text, items, make_row, text
from train.data.rows.row import Codes, Row, RowTurn

_ASKING, _ANSWERING, _SYSTEM = ("user", "human"), ("assistant", "gpt"), ("system", "developer")
_ROLE = ("role", "from")
_SPEAKERS = _ASKING + _ANSWERING + _SYSTEM

Message = Mapping[str, Any]
ReadCodes = Callable[[list[Message]], Sequence[Codes | None]]


def _speaks(messages: Any, *names: str) -> bool:
    """True for a list of messages with these fields."""
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, Mapping) and set(names) <= first.keys()


def system_of(data: Mapping[str, Any], messages: Sequence[Message]) -> str:
    """Text of the system messages before the first question, joined by blank lines, or else the record's field `system`."""
    first = itertools.takewhile(lambda message: _who(message) in _SYSTEM, messages)
    return "\n\n".join(filter(None, (_said(message).text for message in first))) or text(data, "system")


def turns_of(
    data: Mapping[str, Any], messages: Sequence[Message], files: Files, codes: ReadCodes = lambda answers: [None] * len(answers)
) -> list[RowTurn]:  # fmt: skip
    """Make turns of a record's messages and recordings; system messages are left out (`system_of`). `codes` gives answers'.
    Recordings of the record belong to the tags in the texts, in their order; without tags, to the questions. UserError where
    they are not as many, where a message says nothing, or is by an unknown speaker, and where sides do not alternate."""
    asked = _pairs(messages)
    heard = {position: files.sound(recording) for position, recording in _assigned(recordings_of(data), asked).items()}
    coded = iter(codes([answer.message for _, answer in asked if answer is not None]))
    turns = []
    for index, (question, answer) in enumerate(asked):
        sides: list[Any] = [question.text, heard.get((index, 0))]
        if answer is not None:
            sides += [answer.text, heard.get((index, 1)), next(coded)]
        if not any(sides[:2]) or (answer is not None and not any(sides[2:])):
            side = "answer" if any(sides[:2]) else "question"
            raise UserError(f"{side} {index} has no text, and there is no recording of it: drop the row")
        turns.append(RowTurn(*sides))
    return turns


def _who(message: Message) -> str:
    role = message.get("role", message.get("from"))
    return role if role in _SPEAKERS else text(message, *_ROLE, needed=True).lower()


def _said(message: Message) -> Said:
    try:
        said = read_said(message)
        check_text(said.text, "that")
    except UserError as error:
        raise UserError(f"a message of {_who(message)!r} {error}") from None
    return said


def _pairs(messages: Sequence[Message]) -> list[tuple[Said, Said | None]]:
    """Pair each question with its answer; None for a last question without one. A recording and the texts of the same side
    that stand beside it are one."""
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
    return list(itertools.zip_longest(sides[::2], sides[1::2]))


def _assigned(value: Any, asked: Sequence[tuple[Said, Said | None]]) -> dict[tuple[int, int], Any]:
    """The recording of each question (0) and answer (1) by its turn's index; UserError where they are not as many as belong
    there."""
    if value is None and not any(said and (said.recordings or "<" in said.text) for pair in asked for said in pair):
        return {}
    sides = {(i, side): said for i, pair in enumerate(asked) for side, said in enumerate(pair) if said is not None}
    out = {position: list(said.recordings) for position, said in sides.items()}
    wanted = {position: tags(said.text) for position, said in sides.items() if not said.recordings}
    recordings = listed(value)
    if sum(wanted.values()):
        named = [recording for recording in recordings if present(recording)]
        if len(named) != sum(wanted.values()):
            raise UserError(f"its texts have tags (<audio>) of {sum(wanted.values())} recordings, {len(named)} are there")
        for position, count in wanted.items():
            out[position], named = named[:count], named[count:]
    elif recordings:
        if len(recordings) not in (1, len(asked)):
            raise UserError(f"has {len(recordings)} recordings for {len(asked)} questions: fix the row")
        for index, recording in enumerate(recordings, len(asked) - len(recordings)):
            out[index, 0] += [recording] if present(recording) else []
    for (index, side), heard in out.items():
        if len(heard) > 1:
            raise UserError(f"{'answer' if side else 'question'} {index} has {len(heard)} recordings, not one: join them")
    return {position: heard[0] for position, heard in out.items() if heard}


def chat_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one chat; UserError where it is broken."""
    messages = items(data, "messages" if data.get("messages") is not None or "conversations" not in data else "conversations")
    turns, system = turns_of(data, messages, files), system_of(data, messages)
    return make_row(turns, options, "chat", where, id=text(data, "id", "prompt_id"), system=system)


def alpaca_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one instruction; UserError where it is broken."""
    asked, context, answered = text(data, "instruction", needed=True), text(data, "input"), text(data, "output", needed=True)
    if not asked or not answered:
        raise UserError(f"has no {'output' if asked else 'instruction'}: drop the row")
    said = [*_history(data), f"{asked}\n\n{context}" if context else asked, answered]
    if recordings_of(data) and not any(map(tags, said)):
        raise UserError(
            "has a recording beside its texts, and none has a tag of it, such as <audio>: drop the row, or write tables with "
            "question_audio, question_text, answer_text (--read.format table)"
        )
    messages = [{"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(said)]
    turns = turns_of(data, messages, files)
    return make_row(turns, options, "alpaca", where, id=text(data, "id"), system=text(data, "system"))


def _history(data: Mapping[str, Any]) -> list[str]:
    """Questions and answers before the instruction, of the field `history`; UserError where it holds none."""
    said: list[str] = []
    history = data.get("history") or []
    for entry in history if isinstance(history, list) else [None]:
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(part, str) and part.strip() for part in entry):
            raise UserError("field 'history' is not a list of [question, answer]: fix the row")
        said += (check_text(part.strip(), "field 'history'") for part in entry)
    return said


CHAT = RecordReader(
    "chat",
    'written chats: JSON or Parquet of {"messages": [{"role", "content"}]}, also of several turns',
    chat_row,
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
    messages = items(data, "conversations")
    turns = turns_of(data, messages, files, lambda answers: [_snac_codes(answer, files, options) for answer in answers])
    for turn in turns:
        check_duration(turn.answer_codes, seconds(turn.answer_audio))
    return make_row(turns, options, "lucy", where, id=text(data, "id"), system=system_of(data, messages))


def _snac_codes(message: Mapping[str, Any], files: Files, options: ReaderOptions) -> Codes | None:
    """Read the codes of the file that an answer names."""
    name = text(message, "codec")
    if not name:
        return None
    path = files.file(name, "codes")
    try:
        written = path.read_text("utf-8")
    except ValueError as error:
        raise UserError(f"codes {name!r} are no text: seven integers a frame are expected") from error
    try:
        return read_codes(written, "snac", "levels", options)
    except UserError as error:
        raise UserError(f"codes {name!r}: {error}") from error


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


def llama_omni_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one conversation; UserError where it is broken."""
    messages = items(data, "conversations")
    units = next((data[name] for name in _UNITS if data.get(name) is not None), None)
    turns = turns_of(
        data, messages, files, lambda answers: [_unit_codes(unit, files, options) for unit in _for_each(units, len(answers))]
    )  # fmt: skip
    return make_row(turns, options, "llama-omni", where, id=text(data, "id"), system=system_of(data, messages))


def _for_each(value: Any, count: int) -> list[Any]:
    """Assign units to each answer. A list of integers, or what is no list, belongs to the last: earlier ones have none."""
    if not isinstance(value, list) or all(isinstance(element, int) for element in value):
        return [None] * (count - 1) + [value or None] if count else []
    if len(value) != count:
        raise UserError(f"units has {len(value)} entries for {count} answers: fix the row")
    return value


def _unit_codes(value: Any, files: Files, options: ReaderOptions) -> Codes | None:
    if isinstance(value, str) and value.endswith(".npy"):
        path = files.file(value, "units")
        return read_codes(load_array(path), "", "", options)
    return None if value is None else read_codes(value, "", "", options)


LLAMA_OMNI = RecordReader(
    "llama-omni",
    "LLaMA-Omni, VocalNet: JSON of speech and conversations (from human, gpt), units in .npy; the same of text alone",
    llama_omni_row,
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
    field = _code_field(data, options.codec)
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


def _code_field(data: Mapping[str, Any], codec: str) -> str:
    """Name of the field whose codes are used: that of the wanted codec, or else the first that is not empty."""
    filled = [field for field in _CODES if data.get(field)]
    return next((field for field in filled if codec and codec.startswith(_CODES[field])), filled[0] if filled else "")


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
