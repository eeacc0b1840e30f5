"""Eighty command lines drawn at random: each is answered, or refused in one line; nothing is half-written, nothing read without
end."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import soundfile

from tests.infer.conftest import write_question

HUGE = ["nan", "inf", "-inf", "1e300", "-1", "1" + "0" * 30, "1" + "0" * 5000, "", "x", "0"]
NUMBERS = {
    "temperature": ["0.7", "1e-300"], "top_k": ["5", "2147483647"], "top_p": ["0.9", "1e-6"], "repetition_penalty": ["1.2"],
    "seed": ["7", str(2**64 - 1), str(2**64)], "max_seconds": ["0.08", "1e308"], "max_tokens": ["4"], 
    "threads": ["1", "5000"], "channel": ["0", "1"], "input_rate": ["8000"],
}  # fmt: skip
"""Options that take a number, with values that are right or nearly so; each is also given one of `HUGE`."""

FLAGS = ["--chat", "--json", "--debug"]
WORDS = {
    "task": ["A1A2", "A1T2", "T1A2", "T1T2", "nonsense"], "device": ["cpu", "cuda:99", "abacus"],
    "dtype": ["float32", "int4"], "quantize": ["int8", "int3"],
    "out": ["b.wav", "-", "q.wav", "no/b.wav", "/dev/full/b.wav", "fr\udce9.wav", "a" * 300],
    "adapter": ["nowhere"], "edits": ["q.wav"],
}  # fmt: skip
QUESTIONS = [["q.wav"], ["q.wav", "q.wav"], ["none.wav"], ["fr\udce9.wav"], ["fr\udce9"], ["--text", "hi"],
             ["--text", "hi", "x"], ["-", "-"], [], ["notes.txt"], ["a\0b"]]  # fmt: skip


def line(number: int) -> list[str]:
    """A command line: a question that is mostly right, and up to three options of which some are mostly wrong."""
    draw = random.Random(number)
    words = list(draw.choice(QUESTIONS if draw.random() < 0.3 else [["q.wav"], ["--text", "hi"]]))
    for _ in range(draw.randrange(1, 4)):
        kind = draw.random()
        if kind < 0.5:
            name = draw.choice(list(NUMBERS))
            words += [f"--{name}", draw.choice(HUGE if draw.random() < 0.5 else NUMBERS[name])]
        elif kind < 0.8:
            name = draw.choice(list(WORDS))
            words += [f"--{name}", draw.choice(WORDS[name])]
        else:
            words.append(draw.choice(FLAGS))
    return words + ["--max_tokens", "4"] * (number % 2)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("number", range(80))
def test_a_line_is_answered_or_refused(number: int, run, tmp_path: Path) -> None:
    write_question(tmp_path / "q.wav", seconds=0.1)
    (tmp_path / "fr\udce9.wav").write_bytes((tmp_path / "q.wav").read_bytes())
    (tmp_path / "notes.txt").write_text("dear diary")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    words = line(number)
    if "--max_seconds" not in words:
        words += ["--max_seconds", "0.08"]
    done = run("ask", *words)
    after = {p.name: p for p in tmp_path.iterdir()}
    assert done.code in (0, 2), (words, done.err[-2000:])
    assert not [name for name in after if ".part" in name], words
    if done.code == 0:
        assert "error" not in done.err and "Traceback" not in done.err
        for name in after.keys() - before.keys():
            assert soundfile.info(open(after[name], "rb")).frames > 0  # noqa: SIM115
    else:
        last = done.err.splitlines()[-1]
        assert last.startswith("error: ") and len(last) < 600, (words, last)
        assert ("--debug" in words) or done.err.count("\n") == 1, (words, done.err)
        assert not re.search(r"<class|object at 0x", last), last
