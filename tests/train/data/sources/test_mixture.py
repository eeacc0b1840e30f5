"""Draws are pure functions of (seed, n): epochs are permutations, shares exact, tasks and curriculum by number."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.train.data.toys import MODELS, ToySource, codec_of
from train.data.config import DataConfig, SourceConfig, tasks_of
from train.data.seeding import key, seeded_generator, seeded_rng, shuffled
from train.data.sources.mixture import BLOCK, Mixture, Stage, TaskMixture

CODEC = codec_of(MODELS["codec2"])


def sources(*sizes):
    return [ToySource(f"toy{i}", size, CODEC) for i, size in enumerate(sizes)]


def test_shuffling_prefers_no_place():
    """Where index 0 of 8 goes, over many keys: each place about equally often (a chi-square with 7 degrees of freedom)."""
    counts = Counter(shuffled(0, 8, seed) for seed in range(4000))
    assert sum((counts[i] - 500) ** 2 / 500 for i in range(8)) < 30
    with pytest.raises(IndexError):
        shuffled(8, 8, 0)


def test_keys_tell_their_parts_apart():
    assert len({key(1, 2), key(12), key("1", 2), key("1", "2"), key(1, "2"), key(2, 1), key("12")}) == 7
    assert key(1, "a") == key(1, "a") < 1 << 63
    assert seeded_rng(3).random() == seeded_rng(3).random() != seeded_rng(4).random()
    assert seeded_generator(3).initial_seed() == seeded_generator(3).initial_seed() != seeded_generator(4).initial_seed()


def test_sources_are_mixed_within_a_block_and_differently_in_the_next():
    mixture = Mixture(sources(None, None), (1, 1), seed=1)
    order = [mixture.draw(n).source for n in range(2 * BLOCK)]
    assert order[:BLOCK] != order[BLOCK:]
    for shards in (2, 4, 8):  # no shard sees one source only
        for shard in range(shards):
            share = sum(order[shard::shards]) / len(order[shard::shards])
            assert 0.3 < share < 0.7


@pytest.mark.parametrize("size", [1, 7, 64])
def test_every_epoch_of_a_finite_source_is_a_permutation_of_its_rows(size):
    mixture = Mixture(sources(None, size), (2, 1), seed=5)
    rows = [draw.index for draw in map(mixture.draw, range(6 * BLOCK)) if draw.source == 1]
    epochs = [rows[i : i + size] for i in range(0, len(rows) - size, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if size > 1:
        assert len({tuple(epoch) for epoch in epochs[:8]}) > 1


def test_any_draw_can_be_made_alone():
    whole = [Mixture(sources(None, 9), (1, 2), seed=2).draw(n) for n in range(50)]
    mixture = Mixture(sources(None, 9), (1, 2), seed=2)
    assert [mixture.draw(n) for n in reversed(range(50))] == whole[::-1]
    assert whole != [Mixture(sources(None, 9), (1, 2), seed=3).draw(n) for n in range(50)]
    assert all(draw.index == draw.number for draw in whole if draw.source == 0)


def test_tasks_follow_their_weights_and_the_curriculum():
    stages = (Stage(100, {"A1T1": 1.0}), Stage(200, {"A1T1": 1, "A1T2": 1}))
    mixture = TaskMixture({"A1A2": 3.0, "T1T2": 1.0, "A1T2": 0.0}, stages)
    assert {mixture.task(n, 0, 7) for n in range(100)} == {"A1T1"}
    assert {mixture.task(n, 0, 7) for n in range(100, 200)} == {"A1T1", "A1T2"}
    counts = Counter(mixture.task(n, 0, 7) for n in range(200, 4200))
    assert set(counts) == {"A1A2", "T1T2"} and abs(counts["A1A2"] / 4000 - 0.75) < 0.03
    assert [mixture.task(n, 0, 7) for n in range(300, 330)] != [mixture.task(n, 1, 7) for n in range(300, 330)]


def test_rows_that_name_their_own_task_are_of_the_mixture() -> None:
    recorded = {"voices": 0.25, "more": 0.25, "more_voices": {"en": ("espeak",)}, "words": "dog", "wordy": 0.4}
    data = DataConfig((SourceConfig("recorded-digits", tasks={"A1A2": 1.0}, options=recorded),))
    assert data.drawn == {"A1A2", "A1T1"} and [task.name for task in tasks_of(data)] == ["A1T1", "A1A2"]
