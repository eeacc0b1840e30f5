"""Pauses in features, and the labels of the turn head that follow them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from omni.audio.mel import LOWEST
from omni.config import ModelConfig
from tests.train.data.test_augment import seeded
from tests.train.data.toys import MODELS, ToySource, codec_of, maker_of
from train.data import augment
from train.data.augment import augment_mel, energy, gaps, insert, speech
from train.data.batching.batch import assemble
from train.data.batching.examples import Clip, Example, Prepared, turn_labels
from train.data.config import AugmentConfig
from train.data.rows.row import Row, Sound

PAUSES = AugmentConfig(pauses=(0.2, 0.5), pause_probability=1.0)
TURN = {"floor": LOWEST, "rate": 100.0}
WARPED = AugmentConfig(warp_speed=(0.8, 1.2), warp_bands=(0.9, 1.1), feature_noise=(-6, -1), feature_gain_db=(-16, 8))
CHUNKED: ModelConfig = replace(
    MODELS["codec2"], encoder=replace(MODELS["codec2"].encoder, mode="chunked", long_audio="split"), turn=True
)


def words(*levels: float, frames: int = 10, bands: int = 80) -> Tensor:
    """Features [M, F] of stretches of `frames` frames, each at a level."""
    return torch.tensor(levels).repeat_interleave(frames).repeat(bands, 1)


def test_speech_is_what_lies_within_30_db_of_the_loudest_and_above_the_floor() -> None:
    levels = (1.0, 1.0 - 3.0 / 4 + 0.01, 1.0 - 3.0 / 4 - 0.01, LOWEST)
    assert speech(words(*levels, frames=1)).tolist() == [True, True, False, False]
    assert torch.allclose(energy(words(*levels, frames=1)), 4 * torch.tensor(levels) - 4)
    assert not speech(words(LOWEST, LOWEST + 0.1)).any()  # silence, and what is hardly more
    one_band = torch.full((80, 2), LOWEST)
    one_band[3, 1] = 1.0
    assert speech(one_band).tolist() == [False, True]


def test_gaps_are_the_quietest_places_between_words() -> None:
    mel = words(LOWEST, 1.0, 0.0, 1.0, 0.9, 1.0, LOWEST)
    mel[:, 20:30] += (torch.arange(10) - 4).abs() / 20  # 24 is quietest; 0.9 is too loud for a gap, and the ends are none
    assert gaps(mel, speech(mel)) == [24]
    assert gaps(words(LOWEST), speech(words(LOWEST))) == []


def test_labels_frame_by_frame() -> None:
    voice = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]).bool()  # the pause is no end
    assert turn_labels(voice, 10).tolist() == [
        *([0, 0], [1, 0], [1, 0], [0, 0], [1, 0]),
        *([0, -1], [0, -1], [0, 1], [0, 1], [0, 1]),
    ]
    assert turn_labels(torch.ones(4).bool(), 2).tolist() == [[1, 0], [1, 0]]
    assert turn_labels(torch.zeros(4).bool(), 2).tolist() == [[0, -1], [0, -1]]


@pytest.mark.parametrize(
    "config", [AugmentConfig(), WARPED, replace(WARPED, time_masks=(2, 20), freq_masks=(1, 12), feature_echo=(5, 35))]
)
def test_where_nothing_is_put_in_nothing_changes(config: AugmentConfig) -> None:
    mel = torch.randn(80, 70, generator=seeded(0)) * 0.3
    wanted, _ = augment_mel(mel, config, seeded(3), floor=LOWEST)
    off = replace(config, pauses=(0.2, 0.5), pause_probability=0.0, pause_before=(0.0, 0.0), pause_after=(0.0, 0.0))
    for one in (config, off):
        found, voice = augment_mel(mel, one, seeded(3), voice=speech(mel), **TURN)
        assert found.equal(wanted) and voice is not None and len(voice) == found.shape[1]


def test_pauses_are_silence_that_is_put_in_and_voice_follows() -> None:
    mel = words(LOWEST, 1.0, LOWEST, 1.0, LOWEST, 1.0, LOWEST)
    counts = set()
    for seed in range(30):
        found, voice = augment_mel(mel, PAUSES, seeded(seed), voice=speech(mel), **TURN)
        again, _ = augment_mel(mel, PAUSES, seeded(seed), **TURN)
        assert voice is not None and again.equal(found)
        assert voice.equal(speech(found))
        assert found[:, voice].equal(mel[:, speech(mel)]) and (found[:, ~voice] == LOWEST).all()
        edges = voice.int().diff().nonzero().flatten()
        lead, inside, tail = int(edges[0]) + 1, edges[2::2] - edges[1:-1:2], found.shape[1] - 1 - int(edges[-1])
        assert 10 <= lead <= 90 and 10 <= tail <= 170
        longer = [int(n) for n in inside if n > 10]
        assert all(30 <= n <= 60 for n in longer)
        counts.add(len(longer))
    assert counts == {1, 2}


def test_masks_leave_pauses_alone_and_noise_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "MASKED", 1.0)
    monkeypatch.setattr(augment, "NOISY", 1.0)
    mel = words(0.5, 0.5) + torch.linspace(0, 0.1, 20)
    masks = AugmentConfig(pauses=(0.2, 0.5), pause_before=(0.5, 0.5), pause_after=(0.5, 0.5), time_masks=(6, 60))
    found, voice = augment_mel(mel, masks, seeded(0), voice=speech(mel), **TURN)
    assert voice is not None and (found[:, ~voice] == LOWEST).all() and (found[:, voice] != mel).any()
    changed = found[:, voice][found[:, voice] != mel]
    assert torch.allclose(changed, mel.mean())
    config = replace(PAUSES, feature_noise=(-2, -1))
    noisy, _ = augment_mel(mel, config, seeded(0), **TURN)
    assert (noisy[:, :1] > LOWEST).any()


def test_runs_are_put_in_before_their_frames() -> None:
    assert insert(torch.tensor([1.0, 2.0, 3.0]), [(0, 1), (2, 2), (3, 1)], 0.0).tolist() == [0, 1, 2, 0, 0, 3, 0]


def row_of(turns: int = 1) -> Row:
    source = ToySource("toy", None, codec_of(CHUNKED), turns)
    return next(row for i in range(100) if len((row := source.row(i)).turns) == turns)


def make(row: Row, model: ModelConfig = CHUNKED, **options: object) -> Example:
    return maker_of(model, **options).make(0, Prepared(row, (0, 0)), ["A1T1"] * len(row.turns))


def test_each_question_of_a_conversation_has_labels_of_its_own() -> None:
    options = {"augment": replace(WARPED, pauses=(0.2, 0.5))}
    made, again = make(row_of(2), **options), make(row_of(2), **options)
    assert len(made.clips) == 2
    for clip, same in zip(made.clips, again.clips, strict=True):
        assert clip.turn is not None and clip.turn.shape == (clip.frames, 2) and clip.turn.dtype == torch.int8
        assert clip.inputs.equal(same.inputs) and clip.turn.equal(same.turn)
    batch = assemble([[made], []], 256, CHUNKED.layout, 80, {})
    assert batch.turn is not None and batch.turn.equal(torch.cat([clip.turn for clip in made.clips if clip.turn is not None]))
    assert batch.turn_labels == int((batch.turn >= 0).sum())
    moved = batch.moved(lambda tensor: tensor.clone())
    assert moved.turn is not None and moved.turn.equal(batch.turn) and moved.turn_labels == batch.turn_labels


def test_a_model_without_the_head_has_the_same_examples_without_labels() -> None:
    bare = make(row_of(), replace(CHUNKED, turn=False), augment=WARPED)
    labelled = make(row_of(), augment=WARPED)
    assert [clip.turn for clip in bare.clips] == [None]
    assert all(a.inputs.equal(b.inputs) for a, b in zip(bare.clips, labelled.clips, strict=True))
    assert assemble([[bare]], 256, CHUNKED.layout, 80, {}).turn is None


def test_noise_in_the_sound_is_no_voice_and_windows_of_a_longer_one_have_no_labels() -> None:
    row, audio = row_of(), torch.zeros(16_000)
    audio[4000:8000] = torch.randn(4000, generator=seeded(0)) * 0.1
    asked = replace(row.turns[0], question_audio=Sound(audio, 16_000))
    made = make(replace(row, turns=(asked,)), augment=AugmentConfig(noise_snr_db=(0, 0), speed=(0.5, 0.5)))
    turn = made.clips[0].turn
    assert turn is not None and len(turn) == 100
    assert turn[:, 0].nonzero().flatten().tolist() == list(range(25, 52)) or 24 <= int(turn[:, 0].nonzero()[0]) <= 26
    assert turn[60:, 1].eq(1).all() and turn[:50, 1].eq(0).all()
    asked = replace(asked, question_audio=Sound(audio.repeat(3), 16_000))
    assert [clip.turn for clip in make(replace(row, turns=(asked,))).clips] == [None, None]
    with_none = assemble([[replace(made, clips=(made.clips[0], Clip(torch.zeros(80, 4), 2)))]], 256, CHUNKED.layout, 80, {})
    assert with_none.turn is not None and with_none.turn[-2:].eq(-1).all()
