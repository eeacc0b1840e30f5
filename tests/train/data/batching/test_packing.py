"""Packing: rows are filled as full as can be, and hold exactly their examples."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from omni.errors import UserError
from omni.layout import IGNORE
from tests.train.data.toys import MODELS, ToySource, codec_of, maker_of, pipeline_of
from train.data.batching.batch import assemble
from train.data.batching.loader import PackerShard, Pipeline, choose
from train.data.config import PackingConfig
from train.data.rows.row import Sound
from train.data.sources.mixture import Mixture, TaskMixture


def slow_choose(lengths: list[int], room: int) -> int:
    """Every subset with the first example, tried."""
    rest = range(1, len(lengths))
    subsets = (s for k in range(len(lengths)) for s in itertools.combinations(rest, k))
    return max(n for s in subsets if (n := lengths[0] + sum(lengths[i] for i in s)) <= room)


def test_a_row_is_filled_as_the_slow_reference_fills_it():
    rng = random.Random(0)
    for _ in range(400):
        lengths = [rng.randint(1, 30) for _ in range(rng.randint(1, 9))]
        room = rng.randint(max(lengths), 90)
        chosen = choose(lengths, room)
        assert sum(lengths[i] for i in chosen) == slow_choose(lengths, room)
        assert chosen[0] == 0 and chosen == sorted(set(chosen))


def test_of_equally_full_rows_the_older_examples_go_first():
    assert choose([4, 3, 3, 3], 10) == [0, 1, 2]
    assert choose([4, 1, 6, 6], 10) == [0, 2]


@pytest.mark.parametrize(("low", "high", "length"), [(35, 110, 512), (35, 110, 1024), (60, 400, 2048)])
def test_padding_stays_under_five_percent_and_nothing_waits_for_long(low, high, length):
    rng = random.Random(1)
    waiting: list[tuple[int, int]] = []
    used, rows, drawn, oldest = 0, 300, 0, 0
    for _ in range(rows):
        while len(waiting) < 16 or sum(n for n, _ in waiting) < 1.25 * length:
            waiting.append((rng.randint(low, high), drawn))
            drawn += 1
        chosen = set(choose([n for n, _ in waiting], length))
        used += sum(waiting[i][0] for i in chosen)
        oldest = max(oldest, *(drawn - waiting[i][1] for i in chosen))
        waiting = [w for i, w in enumerate(waiting) if i not in chosen]
    assert 1 - used / (rows * length) < 0.05
    assert oldest < 100


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("turns", [1, 3])
def test_a_batch_holds_exactly_its_examples(name, turns):
    """Each packed example against the one made alone, and each of its feature columns against the clip it must point at."""
    model, packing = MODELS[name], PackingConfig(rows=3, length=200, buffer=8)
    shard = PackerShard(pipeline_of(model, turns=turns, packing=packing), 0, 1)
    alone = pipeline_of(model, turns=turns, packing=packing)
    pad = model.layout.ids("pad")
    seen: set[int] = set()
    for _ in range(3):
        before = {*range(shard.next), *(e.draw for e in shard.buffer)} - seen
        batch = shard.batch()
        waiting = {example.draw for example in shard.buffer}
        drawn = {*range(shard.next)} - seen - waiting
        assert before - waiting <= drawn
        examples = {number: alone.fetch(number) for number in drawn}
        seen |= drawn
        assert batch.examples == len(examples) and batch.positions == sum(len(e.columns) for e in examples.values())
        clip_of = [n for n, frames in enumerate(batch.frames) for _ in range(-(-frames // model.projector.stack))]
        feature_of = [i for frames in batch.frames for i in range(-(-frames // model.projector.stack))]
        found = 0
        for r in range(packing.rows):
            used = int((batch.task[r] >= 0).sum())
            numbers = batch.segments[r].tolist()
            assert numbers[:used] == sorted(numbers[:used]) and set(numbers[used:]) <= {max(numbers[:used]) + 1}
            assert torch.equal(batch.tokens[r, :, used:], pad[:, None].expand(-1, packing.length - used))
            assert (batch.targets[r, :, used:] == IGNORE).all() and (batch.feature_index[r, used:] == -1).all()
            for number in range(max(numbers[:used]) + 1):
                at = (batch.segments[r, :used] == number).nonzero().squeeze(1)
                tokens = batch.tokens[r][:, at]
                example = next(e for e in examples.values() if torch.equal(e.columns.tokens, tokens))
                examples.pop(example.draw)
                found += 1
                assert torch.equal(batch.targets[r][:, at], example.columns.targets)
                assert torch.equal(batch.task[r, at], example.task)
                own = [(n, i) for n, clip in enumerate(example.clips) for i in range(-(-clip.frames // model.projector.stack))]
                for column, index in zip(at.tolist(), example.columns.feature_index.tolist(), strict=True):
                    pointed = int(batch.feature_index[r, column])
                    if index < 0:
                        assert pointed == -1
                        continue
                    clip, frame = own[index]
                    assert feature_of[pointed] == frame
                    n = clip_of[pointed]
                    mel = example.clips[clip].inputs
                    assert batch.input_lengths[n] == mel.shape[1] and torch.equal(batch.inputs[n, :, : mel.shape[1]], mel)
                    assert not batch.inputs[n, :, mel.shape[1] :].any()
        assert found == batch.examples and not examples
        assert [len(at) for at in batch.supervised] == (batch.targets != IGNORE).sum((0, 2)).tolist()


def test_rows_without_speech_make_a_batch_without_clips():
    model = MODELS["codec2"]
    batch = assemble([[], []], 8, model.layout, 80, {})
    assert batch.inputs.shape == (0, 80, 0) and batch.frames == [] and batch.examples == 0 and batch.padding == 1
    assert (batch.segments == 0).all() and (batch.task == -1).all()


def test_what_no_row_can_hold_is_named_or_skipped_and_counted():
    model = MODELS["codec2"]
    shard = PackerShard(pipeline_of(model, packing=PackingConfig(rows=2, length=30, buffer=4)), 0, 1)
    with pytest.raises(UserError, match=r"toy\d row \d+ takes \d+ time steps as .*, a packed row holds 30: raise packing"):
        for _ in range(20):
            shard.batch()
    shard = PackerShard(pipeline_of(model, packing=PackingConfig(rows=2, length=30, buffer=4, too_long="skip")), 0, 1)
    batches = [shard.batch() for _ in range(4)]
    assert batches[-1].state["skipped"] > 0
    taken = sum(batch.examples for batch in batches) + len(shard.buffer)
    assert taken + shard.skipped == shard.next
    shard = PackerShard(pipeline_of(model, packing=PackingConfig(rows=2, length=2, buffer=4, too_long="skip")), 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.data.batching.loader._GIVE_UP", 1000)
        with pytest.raises(UserError, match=r"\b50 examples.* too long .*packing.length 2 "):
            shard.batch()


class Mixed(ToySource):
    """Of four rows one lasts longer than the encoder hears, and one has lost its question."""

    def row(self, index):
        row = super().row(index)
        sounds = {1: Sound(torch.randn(16000 * 3) * 0.1, 16000), 2: None}
        turns = tuple(replace(turn, question_audio=sounds.get(index % 4, turn.question_audio)) for turn in row.turns)
        return replace(row, turns=turns)


def mixed(too_long: str, broken: str) -> Pipeline:
    model = MODELS["codec2"]
    model = replace(model, encoder=replace(model.encoder, long_audio="refuse"))
    source = Mixed("mixed", 8, codec_of(model))
    packing = PackingConfig(rows=2, length=300, buffer=4, too_long=too_long)
    return Pipeline(Mixture([source], [1.0]), [TaskMixture({"A1A2": 1.0})], maker_of(model), packing, broken=broken)


def test_rows_that_are_too_long_or_broken_are_named_or_skipped_and_counted():
    with pytest.raises(UserError, match=r"mixed row \d, turn 0: the sound lasts 3.0 s and the encoder takes 2 s"):
        PackerShard(mixed("error", "skip"), 0, 1).batch()
    with pytest.raises(UserError, match=r"mixed row \d, turn 0: there is no question_audio"):
        PackerShard(mixed("skip", "error"), 0, 1).batch()
    pipeline = mixed("skip", "skip")
    shard = PackerShard(pipeline, 0, 1)
    batches = [shard.batch() for _ in range(6)]
    drawn = [pipeline.mixture.draw(n).index % 4 for n in range(shard.next)]
    assert (shard.skipped, shard.broken) == (drawn.count(1), drawn.count(2)) and shard.skipped and shard.broken
    resumed = PackerShard(mixed("skip", "skip"), 0, 1, state=batches[2].state)
    for batch in batches[3:]:
        again = resumed.batch()
        assert again.state == batch.state and torch.equal(again.tokens, batch.tokens)


def test_what_the_host_has_found_is_pinned_too(monkeypatch):
    """Otherwise every copy of it to a GPU makes the host wait."""
    batch = PackerShard(pipeline_of(MODELS["codec2"]), 0, 1).batch()
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.clone()) or pinned[-1])
    there = batch.pin_memory()
    held = [getattr(there, name) for name in there.TENSORS] + there.supervised + [there.packed.ends]
    assert {id(t) for t in held} == {id(t) for t in pinned}
    assert all(torch.equal(a, b) for a, b in zip(there.supervised, batch.supervised, strict=True))
