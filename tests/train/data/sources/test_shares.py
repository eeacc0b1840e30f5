"""Weights that follow a schedule and sources that end: shares by integrals, limits by counts, any draw alone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from omni.config import from_dict
from omni.errors import UserError
from tests.train.data.toys import MODELS, ToySource, codec_of, pipeline_of
from train.checkpoint.retention import differences
from train.config.parse import read_fit_config
from train.config.run import FitConfig, plain_config
from train.data.batching.loader import Counts, PackerShard, StepLoader, Trained, merge
from train.data.build import build_mixture
from train.data.config import DataConfig, PackingConfig, SourceConfig
from train.data.sources.mixture import BLOCK, Mixture, Shares, UsedUp, Weight, weight_at

CODEC = codec_of(MODELS["codec2"])
RISING: tuple[Weight, ...] = (((2000, 1.0), (9000, 0.0), (15000, 3.0)), ((0, 0.5), (12000, 2.0)), 1.0)


def mixture(weights, sizes=None, limits=None, seed=1) -> Mixture:
    sources = [ToySource(f"toy{i}", size, CODEC) for i, size in enumerate(sizes or [None] * len(weights))]
    return Mixture(sources, weights, seed, limits)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "weights", [(1.0,), (0.5, 0.3, 0.2), (1, 0, 3), (1e-3, 1.0), (0.1, 0.2, 0.3, 0.4), (2, 1, 0), (1, 1e-20, 1e-20), RISING]
)
@pytest.mark.parametrize("packers", [1, 99])
def test_shares_follow_the_schedule(weights, packers):
    """Against the integral of each share, by the midpoint rule over single draws."""
    shares, due = Shares(weights, [None] * len(weights), packers), [0.0] * len(weights)
    block = shares.block
    shares.check(20_000)
    for number in range(20_000 // block):
        dealt = shares.dealt(number)
        assert sum(after - before for before, after in dealt) == block
        assert all(abs(before - one) < 3 for (before, _), one in zip(dealt, due, strict=True)), number
        for draw in range(number * block, (number + 1) * block):
            now = [weight_at(weight, draw + 0.5) for weight in weights]
            due = [before + weight / sum(now) for before, weight in zip(due, now, strict=True)]
    assert all((after > 0) == (one > 1) for (_, after), one in zip(dealt, due, strict=True))


def test_blocks_keep_their_order_under_a_schedule_and_any_draw_is_made_alone():
    mixed, again, numbers = mixture(RISING), mixture(RISING), range(2 * BLOCK - 100, 2 * BLOCK + 100)
    whole = [mixed.draw(n) for n in numbers]
    assert [again.draw(n) for n in reversed(numbers)] == whole[::-1]
    assert [draw.source for draw in whole] != sorted(draw.source for draw in whole)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 0.5), (((0, 0.1), (3000, 2.0)), ((100, 1.0), (200, 0.2), (2500, 1.0)), 0.3)])
def test_limits_are_exact_and_others_share_the_weight(weights):
    limits = (25, 1500, 2000)
    mixed = mixture(weights, (10, 400, None), limits)
    assert mixed.total == sum(limits)
    draws = [mixed.draw(n) for n in range(mixed.total)]
    rows = {i: Counter(draw.index for draw in draws if draw.source == i) for i in range(3)}
    assert [sum(of.values()) for of in rows.values()] == [*limits]
    assert sorted(rows[0].values()) == [2] * 5 + [3] * 5 and set(rows[1].values()) == {3, 4} and set(rows[2].values()) == {1}
    for beyond in (mixed.total, mixed.total + 1, 10**9):
        with pytest.raises(UsedUp, match="no more than 3,525 draws"):
            mixed.draw(beyond)
    open_end = mixture(weights, (10, 400, None), (25, 1500, None))
    assert open_end.total is None
    assert {open_end.draw(n).source for n in range(10**6, 10**6 + 50)} == {2}


def test_a_source_that_ends_leaves_its_weight_to_the_others_in_proportion():
    mixed = mixture((6.0, 1.0, 3.0), limits=(600, None, None))
    counts = Counter(mixed.draw(n).source for n in range(8 * BLOCK))
    rest = 8 * BLOCK - 600
    assert counts[0] == 600 and abs(counts[1] - (100 + (rest - 400) / 4)) < 3


def pipeline(draws: bool = True):
    packed = pipeline_of(MODELS["codec2"], (7, 40), (2, 1), packing=PackingConfig(rows=1, length=100, buffer=3))
    if draws:
        sources = packed.mixture.sources
        packed.mixture = Mixture(sources, (((0, 2.0), (60, 0.5)), ((0, 1.0), (90, 3.0))), 3, (21, 80))
    return packed


def used(batches) -> dict[str, Trained]:
    states = {(batch.state["packer_shard"], batch.state["packer_part"]): batch.state for batch in batches}
    return Counts.joined(state["counts"] for state in states.values()).trained


def taken(shards: int, ranks: int, workers: int = 0, start: int = 0, states=None):
    """Batches of every step, over all ranks, until the sources end on any of them; and the states after each step."""
    each = shards // ranks
    loaders = [
        StepLoader(pipeline(), shards, range(rank * each, (rank + 1) * each), workers, start, states) for rank in range(ranks)
    ]
    steps, after = [], []
    try:
        while True:
            steps.append([batch for loader in loaders for batch in next(loader)])
            after.append(json.loads(json.dumps(merge([loader.states for loader in loaders]))))
    except UsedUp:
        return steps, after
    finally:
        for loader in loaders:
            loader.close()


def test_counts_and_batches_are_those_of_any_number_of_ranks_and_of_a_resumed_run():
    steps, after = taken(2, 1)
    plain = [[batch.state for batch in step] for step in steps]
    assert [[batch.state for batch in step] for step in taken(2, 2)[0]] == plain and len(steps) > 4
    for stop in (1, len(steps) // 2, len(steps) - 1):
        resumed, _ = taken(2, 2, start=stop, states=after[stop - 1])
        assert [[batch.state for batch in step] for step in resumed] == plain[stop:]


def test_counts_are_of_what_is_trained():
    """Against the rows of the batches, by their names, and their time steps."""
    steps, after = taken(2, 1)
    batches = [batch for step in steps for batch in step]
    names = [where for batch in batches for where, _ in batch.names.each if where]
    found = Counts.joined(state["counts"] for state in after[-1].values()).trained
    assert found == used(batches)
    source = {"toy0": "data.sources[0] (toy0)", "toy1": "data.sources[1] (toy1)"}
    assert {name: of.rows for name, of in found.items()} == Counter(source[name.split()[0]] for name in names)
    assert sum(of.tokens for of in found.values()) == sum(batch.positions for batch in batches)
    frames = sum(sum(batch.frames) for batch in batches) / MODELS["codec2"].encoder.frames_per_second
    sound = sum(of.milliseconds for of in found.values()) / 1000
    assert frames < sound < frames + len(names) * 20 * CODEC.frame_samples / CODEC.sample_rate


def test_all_rows_are_trained_where_one_packer_has_them_all():
    shard, batches = PackerShard(pipeline(), 0, 1), []
    with pytest.raises(UsedUp):
        while True:
            batches.append(shard.batch())
    assert {name[-5:-1]: of.rows for name, of in used(batches).items()} == {"toy0": 21, "toy1": 80}
    assert not shard.buffer and min(batch.examples for batch in batches) > 0


def config(*sources, **data) -> DataConfig:
    return DataConfig(tuple(SourceConfig(**{"kind": "spoken-digits", **source}) for source in sources), **data)


def test_limits_come_from_epochs_and_rows():
    given = config({"max_epochs": 2.5}, {"max_epochs": 3, "max_rows": 20}, {"max_rows": 9}, {})
    sources = [ToySource(f"toy{i}", size, CODEC) for i, size in enumerate((10, 10, None, 5))]
    assert [one.limit(source.size) for one, source in zip(given.sources, sources, strict=True)] == [25, 20, 9, None]
    assert build_mixture(given, sources, 0).total is None
    with pytest.raises(
        UserError, match=r"data.sources.2.max_epochs is 2, but rows come without end, or uncounted: give max_rows"
    ):
        build_mixture(
            replace(
                given, sources=(*given.sources[:2], SourceConfig("spoken-digits", max_epochs=2), SourceConfig("spoken-digits"))
            ),
            sources,
            0,
        )
    with pytest.raises(UserError, match=r"data.sources.0.max_epochs is 0.01: of 10 rows it leaves none"):
        build_mixture(replace(given, sources=(SourceConfig("spoken-digits", max_epochs=0.01), *given.sources[1:])), sources, 0)


def test_a_schedule_is_read_from_words_and_files_and_compared_with_that_of_a_checkpoint():
    words = ["nano", "--data.sources.0.weight", "[[0, 1], [1000, 0.5]]", "--data.sources.0.max_rows", "7"]
    read, _ = read_fit_config(words)
    assert read.data.sources[0].weight == ((0, 1), (1000, 0.5)) and read.data.sources[0].max_rows == 7
    plain = json.loads(json.dumps(plain_config(read)))
    assert from_dict(FitConfig, plain) == read and not differences(plain, plain_config(read))
    other, _ = read_fit_config([*words[:2], "[[0, 1], [1000, 0.25]]", *words[3:]])
    ((key, before, now),) = differences(plain, plain_config(other))
    assert key.startswith("data.sources[0].weight") and (before, now) == (0.5, 0.25)
    for value in ("[[0, a]]", "[[0, 1, 2]]", "[1, 2]", "much"):
        with pytest.raises(UserError, match="weight"):
            read_fit_config(["nano", "--data.sources.0.weight", value])
