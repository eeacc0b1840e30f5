"""What the library says in the words of the command line: an option where Python has a keyword; names on one line."""

from __future__ import annotations

import re

WORDS: tuple[tuple[str, str], ...] = (
    (r"^(device|dtype|task) (?='|\S+ cannot be had)", r"--\1 "),
    (r"overflow='forget', or start a new session\b", "--forget, or leave --chat out"),
    (r"overflow='forget'", "--forget"),
    (r"\ba larger context\b", "a larger --context"),
    (r"\buse 'cpu'", "use --device cpu"),
    (r"\bload the model in (float\w+)", r"use --dtype \1"),
    (r"\bgive raw PCM with its sample rate instead\b", "pipe raw PCM into - with its --input_rate instead"),
    (r"(?<= )(channel|task)='?(\w+)'?(?![\w.])", r"--\1 \2"),
)
"""A pattern of a message, and what stands there on the command line."""


def on_one_line(name: str) -> str:
    """A name as a line can show it: line ends and control characters as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


def in_options(message: str) -> str:
    """A message with the options' names."""
    for pattern, words in WORDS:
        message = re.sub(pattern, words, message)
    return message
