"""Digests: what comes again is found exactly; distinct texts and words are counted."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from train.data.inspect.collect import TextCounts
from train.data.inspect.validate import repeats, shared


@pytest.mark.parametrize("repeat", [1, 3])
def test_digests_equal_the_plain_search(repeat: int) -> None:
    rng = np.random.default_rng(repeat)
    a, b = rng.integers(0, 40, 60).tolist(), rng.integers(0, 40, 30).tolist()
    ours, theirs = (
        array("Q", [number for i, value in enumerate(values) for number in (value << 57, i // repeat)]) for values in (a, b)
    )
    first = [a.index(value) // repeat for value in a]
    assert list(repeats(ours)) == [(i // repeat, first[i]) for i in range(60) if first[i] != i // repeat]
    assert list(shared(ours, theirs)) == [(i // repeat, b.index(value) // repeat) for i, value in enumerate(a) if value in b]
    none = array("Q")
    assert not list(shared(ours, none)) and not list(repeats(none)) and not list(shared(none, ours))


def test_texts_are_counted_together() -> None:
    parts = [TextCounts(), TextCounts()]
    for i, text in enumerate(["One two", "one  two!", "three", "", "Two"]):
        parts[i % 2].add(text)
    parts[0].merge(parts[1])
    assert parts[0].plain() == {
        "texts": 4, "words": 6, "distinct_texts": 3, "distinct_words": 3, "vocabulary": ["one", "three", "two"],
    }  # fmt: skip
