"""Messages of the library in the words of the command line."""

from __future__ import annotations

import re

WORDS: tuple[tuple[str, str], ...] = (
    (r"^(device|dtype|quantize|kernels|task) (?='|\S+ is not available)", r"--\1 "),
    (r"\ba larger context\b", "a larger --context"),
    (r"\buse 'cpu'", "use --device cpu"),
    (r"\bload the model in (float\w+)", r"use --dtype \1"),
    (r"\bgive raw PCM with its sample rate instead\b", "pipe raw PCM into - with its --input_rate instead"),
    (r"(?<= )(channel|task)='?(\w+)'?(?![\w.])", r"--\1 \2"),
)
"""Patterns of the library's messages, with their replacements on the command line."""


def on_one_line(name: str) -> str:
    """Escapes line ends and control characters in a name, so that it fits on one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


def in_options(message: str) -> str:
    """Replaces keywords in a message by the names of options."""
    for pattern, words in WORDS:
        message = re.sub(pattern, words, message)
    return message
