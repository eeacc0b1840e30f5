"""Digests: what comes again is found exactly; distinct texts and words are counted."""

from __future__ import annotations

import numpy as np
import pytest

from train.data.inspect.collect import TextCounts
from train.data.inspect.validate import Digests


@pytest.mark.parametrize("repeat", [1, 3])
def test_digests_equal_the_plain_search(repeat: int) -> None:
    dice = np.random.default_rng(repeat)
    ours, later, theirs = Digests(), Digests(), Digests()
    a, b = dice.integers(0, 40, 60).tolist(), dice.integers(0, 40, 30).tolist()
    for i, value in enumerate(a):
        (ours if i < 30 else later).add(value << 57, i // repeat)
    for i, value in enumerate(b):
        theirs.add(value << 57, i // repeat)
    ours.extend(later)
    first = [a.index(value) // repeat for value in a]
    assert list(ours.repeats()) == [(i // repeat, first[i]) for i in range(60) if first[i] != i // repeat]
    assert list(ours.shared(theirs)) == [(i // repeat, b.index(value) // repeat) for i, value in enumerate(a) if value in b]
    assert not list(ours.shared(Digests())) and not list(Digests().repeats()) and not list(Digests().shared(ours))


def test_texts_are_counted_together() -> None:
    parts = [TextCounts(), TextCounts()]
    for i, text in enumerate(["One two", "one  two!", "three", "", "Two"]):
        parts[i % 2].add(text)
    parts[0].merge(parts[1])
    assert parts[0].plain() == {
        "texts": 4, "words": 6, "distinct_texts": 3, "distinct_words": 3, "vocabulary": ["one", "three", "two"],
    }  # fmt: skip
