"""A language model's own chat format, taken from its template (`chat_template.jinja`, or `chat_template` of
`tokenizer_config.json`; how it is rendered: transformers' `utils/chat_template_utils.py`).

A template is a program. It is run once, on a conversation of marks, and the text between the marks is kept as ids
(`omni.layout.ChatFormat`); that these give the template's own ids is checked on a conversation of words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from omni.layout import ChatFormat
from omni.text import Tokenizer

SYSTEM, QUESTION, ANSWER, AGAIN = ("@system@", "@question@", "@answer@", "@again@")
TRIAL = ("Be brief.", "What is the capital of France?", "Paris, of course.", "And of Spain?")
"""Words in the places of the marks, by which a format is checked."""

Renderer = Callable[[Sequence[str], str | None], str]
"""Makes the text of a conversation, up to where the next answer begins, of questions and answers in turn, and of a system
message."""


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
    try:
        render = _renderer(template, words)
        before, tail = (tuple(tokenizer.encode(part)) for part in _around(render, [QUESTION]))
        end, *later = tokenizer.encode(_around(render, [QUESTION, ANSWER, AGAIN])[2])
    except Exception:  # a template is anybody's program
        return None
    same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(before[::-1], later[::-1], strict=False))])
    start, question = before[: len(before) - same], before[len(before) - same :]
    system = _around_system(render, question, tokenizer)
    chat = ChatFormat((question, tail), start, system, tuple(later[: len(later) - same]))
    return (chat, end) if _follows(chat, end, render, tokenizer) else None


def _renderer(template: str, words: Mapping[str, Any]) -> Renderer:
    """A template, as transformers renders it."""
    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    today = date(2024, 7, 26).strftime  # Llama 3's day where there is none: the same model, whenever it is converted
    world.globals |= {"raise_exception": _refuse, "strftime_now": today}
    tokens = {key: value for key, value in words.items() if key.endswith("_token")}
    names = {key: value["content"] if isinstance(value, dict) else value for key, value in tokens.items()}
    made = world.from_string(template)

    def render(texts: Sequence[str], system: str | None) -> str:
        roles = ("user", "assistant") * len(texts)
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        return made.render(messages=messages, add_generation_prompt=True, **names)

    return render


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _around(render: Renderer, texts: Sequence[str], system: str | None = None) -> list[str]:
    """What a template has before, between and after texts; ValueError where it changes them."""
    rest, parts = render(texts, system), list[str]()
    for text in [*([] if system is None else [system]), *texts]:
        place = rest.index(text)
        parts.append(rest[:place])
        rest = rest[place + len(text) :]
    return [*parts, rest]


def _around_system(
    render: Renderer, question: tuple[int, ...], tokenizer: Tokenizer
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Ids before and after a system message; None where there is no place for one."""
    try:
        before, after, _ = (tuple(tokenizer.encode(part)) for part in _around(render, [QUESTION], SYSTEM))
    except Exception:
        return None
    return (before, after[: len(after) - len(question)]) if after[len(after) - len(question) :] == question else None


def _follows(chat: ChatFormat, end: int, render: Renderer, tokenizer: Tokenizer) -> bool:
    """Whether the format gives the template's ids of a conversation of words."""
    message, *texts = TRIAL
    (asked, answered, again), (before, tail) = map(tokenizer.encode, texts), chat.question
    opened: dict[str | None, tuple[int, ...]] = {None: chat.start}
    if chat.system is not None:
        opened[message] = (*chat.system[0], *tokenizer.encode(message), *chat.system[1])
    turns = [*before, *asked, *tail, *answered, end, *chat.after, *before, *again, *tail]
    return all([*start, *turns] == tokenizer.encode(render(texts, system)) for system, start in opened.items())
