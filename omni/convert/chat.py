"""A language model's own chat format, taken from its template (`chat_template.jinja`, or `chat_template` of
`tokenizer_config.json`; how it is rendered: transformers' `utils/chat_template_utils.py`).

A template is a program. It is run once, on a conversation of marks, and the text between the marks is kept as ids
(`omni.layout.ChatFormat`); that these give the template's own ids is checked on a conversation of words.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from omni.layout import ChatFormat
from omni.text import Tokenizer

SYSTEM, QUESTION, ANSWER, AGAIN = marks = ("@system@", "@question@", "@answer@", "@again@")
TRIAL = ("Be brief.", "What is the capital of France?", "Paris, of course.", "And of Spain?")
"""Words in the places of the marks, by which a format is checked."""

Ids = tuple[int, ...]


def read_chat(words: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[ChatFormat, int] | None:
    """The format of a model's template, and the id that ends its answers; None without one, or where columns cannot follow it.

    Args:
        words: `tokenizer_config.json`, with the template and the special tokens that it may name.
    """
    template = words.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is None:
        return None
    text = _Template(template, words)
    first, between, system = text.between(marks[1:2]), text.between(marks[1:]), text.between(marks[:2])
    if first is None or between is None:
        return None
    before, tail = (tuple(tokenizer.encode(part)) for part in first)
    end, *later = tokenizer.encode(between[2])
    same = next(
        (n for n, (a, b) in enumerate(zip(before[::-1], later[::-1], strict=False)) if a != b), min(len(before), len(later))
    )
    start, question = before[: len(before) - same], before[len(before) - same :]
    around = None
    if system is not None:
        opening, closing = (tuple(tokenizer.encode(part)) for part in system[:2])
        if closing[len(closing) - same :] == question:
            around = opening, closing[: len(closing) - same]
    chat = ChatFormat((question, tail), start, around, tuple(later[: len(later) - same]))
    return (chat, end) if _follows(chat, end, text, tokenizer) else None


class _Template:
    """A chat template, as transformers renders it."""

    def __init__(self, template: str, words: Mapping[str, Any]) -> None:
        world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        world.globals |= {"raise_exception": _refuse, "strftime_now": time.strftime}
        tokens = {key: value for key, value in words.items() if key.endswith("_token")}
        self._names = {key: value["content"] if isinstance(value, dict) else value for key, value in tokens.items()}
        self._made = world.from_string(template)

    def render(self, texts: Sequence[str], system: str | None = None) -> str:
        """The text of a conversation whose questions and answers take turns, up to where the next answer begins."""
        roles = ("user", "assistant") * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self._made.render(messages=messages, add_generation_prompt=True, **self._names)

    def between(self, parts: Sequence[str]) -> list[str] | None:
        """What is before, between and after marks; None where the template does not take these messages."""
        told = parts[0] if parts[0] == SYSTEM else None
        try:
            rest, found = self.render([part for part in parts if part != told], told), list[str]()
        except TemplateError:
            return None
        for part in parts:
            before, mark, rest = rest.partition(part)
            found.append(before)
            if not mark:
                return None
        return [*found, rest]


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _follows(chat: ChatFormat, end: int, template: _Template, tokenizer: Tokenizer) -> bool:
    """Whether the format gives the template's ids of a conversation of words."""
    told, *texts = TRIAL
    asked, answered, again = map(tokenizer.encode, texts)
    before, tail = chat.question
    for system in (None, told) if chat.system is not None else (None,):
        opening = (
            chat.start
            if chat.system is None or system is None
            else (*chat.system[0], *tokenizer.encode(system), *chat.system[1])
        )
        ours = [*opening, *before, *asked, *tail, *answered, end, *chat.after, *before, *again, *tail]
        if ours != tokenizer.encode(template.render(texts, system)):
            return False
    return True
