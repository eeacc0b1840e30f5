"""Saves and loads conversations: one safetensors file, whose header holds the rest as JSON; nothing in it can run code.

Per turn `turn.N.audio` (the spoken question, [S] float32 at 16 kHz), or `turn.N.question` (its ids), and of the answer
`turn.N.text` (ids) and `turn.N.codes` ([A, F]), where there are any. The metadata's `conversation` holds the version, the
layout, the codec's name, the number of questions asked, and of each turn its task, whether its answer was cut, and its texts.
Weights are not checked: a model that was trained further can continue the conversation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from omni.errors import UserError
from omni.files import write_whole
from omni.generate.history import Exchange, Past
from omni.generate.question import read_question
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS, find_task
from omni.text import Tokenizer

FORMAT_VERSION = 1

KEY = "conversation"


def save_conversation(
    path: str | os.PathLike[str], past: Sequence[Exchange], asked: int, model: SpeechModel, tokenizer: Tokenizer
) -> Path:
    """Write a conversation; the file appears when it is whole.

    Raises:
        UserError: the place cannot be written; what was there before stays.
    """
    tensors: dict[str, Tensor] = {}
    turns = []
    for number, exchange in enumerate(past):
        turn = exchange.turn
        question = turn.question if len(turn.question) else None
        given = {"audio": exchange.clip, "codes": turn.codes, "question": _long(question), "text": _long(turn.text)}
        tensors |= {
            f"turn.{number}.{name}": t.clone(memory_format=torch.contiguous_format)
            for name, t in given.items()
            if t is not None
        }
        texts = {"question": turn.question, "answer": turn.text}
        said = {k: tokenizer.decode(ids) for k, ids in texts.items() if ids}
        turns.append({"task": find_task(turn.task).name, "cut": turn.cut, **said})
    head = {"format": FORMAT_VERSION, **_model(model), "asked": asked, "turns": turns}
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
    """Read a conversation.

    Raises:
        UserError: there is no such file, it is no conversation or of another version, of a model with another layout, codec or
            tokenizer, or its contents contradict each other.
    """
    head, tensors = _read(path)
    if head.get("format") != FORMAT_VERSION:
        raise UserError(f"{path}: format {head.get('format')!r} is unknown; this version reads format {FORMAT_VERSION}")
    for name, own in _model(model).items():
        if head.get(name) != own:
            what = f"codec {head.get(name)!r}, and this model's codec is {own!r}" if name == "codec" else f"another {name}"
            raise UserError(f"{path} is a conversation with a model of {what}; go on with that model")
    try:
        turns = [_turn(number, facts, tensors, model, tokenizer) for number, facts in enumerate(head["turns"])]
        return Past(tuple(turns), max(len(turns), int(head["asked"])))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} does not fit together ({error!r}); save the conversation again") from error


def _turn(number: int, facts: dict[str, Any], tensors: dict[str, Tensor], model: SpeechModel, tokenizer: Tokenizer) -> Any:
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
    asked = read_question(question, task, model, tokenizer)
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


def _model(model: SpeechModel) -> dict[str, Any]:
    """Properties of the model that a conversation depends on, as plain data."""
    layout = json.loads(json.dumps(asdict(model.layout)))
    return {"codec": model.config.codec, "layout": layout}


def _long(ids: Sequence[int] | None) -> Tensor | None:
    return None if ids is None else torch.tensor(tuple(ids), dtype=torch.long)
