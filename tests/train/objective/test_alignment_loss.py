"""What is spelt for the alignment loss, and that loss: torch's CTC, of one spelling or two, of clips that have a transcript."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from omni.errors import UserError
from omni.model.speech_model import SpeechModel
from tests.train.data.toys import TOKENIZER
from tests.train.objective.test_objective import MODELS, gradients, make_examples, pack
from train.data.batching.examples import Alignment
from train.objective.config import ObjectiveConfig
from train.objective.objective import Objective, targets


def test_alignment_loss_is_torch_ctc():
    torch.manual_seed(0)
    model = SpeechModel(MODELS["codec2"])
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2"])], 64)
    losses = Objective(model, ObjectiveConfig(ctc_weight=0.5))(batch, targets(batch))
    heard = model.encode_frames(batch.inputs, batch.input_lengths, batch.frames).split(batch.frames)
    wanted = torch.zeros(())
    for h, ids in zip(heard, batch.transcripts, strict=True):
        scores = model.alignment_head(h).log_softmax(-1)[:, None]
        wanted = wanted + F.ctc_loss(scores, torch.tensor([ids]), (len(h),), (len(ids),), reduction="sum")
    torch.testing.assert_close(losses.ctc_sum, wanted.detach(), rtol=1e-5, atol=1e-4)
    plain_total = Objective(model)(batch, targets(batch)).total
    torch.testing.assert_close(losses.total, plain_total + 0.5 * wanted / 8, rtol=1e-5, atol=1e-5)


def test_the_loss_of_two_spellings_is_the_sum_of_two_ctc_losses():
    torch.manual_seed(0)
    model = SpeechModel(replace(MODELS["codec2"], ctc_sounds=7))
    first = model.config.ctc
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2", "A1T2"])], 96)
    words, sounds = [[1, 2], [], [4]], [[3, 3], [1, 6, 2], []]
    batch.transcripts = [[*w, *(first + i for i in s)] for w, s in zip(words, sounds, strict=True)]
    config = ObjectiveConfig(ctc_weight=1.0, ctc_words=5.0, align_first=0.5)
    losses = Objective(model, config)(batch, targets(batch), 0.0)
    losses.total.backward()
    found = gradients(model)
    model.zero_grad()
    heard = model.encode_frames(batch.inputs, batch.input_lengths, batch.frames).split(batch.frames)
    wanted = torch.zeros(())
    for h, *both in zip(heard, words, sounds, strict=True):
        logits = model.alignment_head(h)
        for ids, part, weight in zip(both, (logits[:, :first], logits[:, first:]), (5.0, 1.0), strict=True):
            if ids:
                scores = part.log_softmax(-1)[:, None]
                wanted = wanted + weight * F.ctc_loss(scores, torch.tensor([ids]), (len(h),), (len(ids),), reduction="sum")
    (wanted / 8).backward()
    assert float(losses.ctc_count) == 8
    torch.testing.assert_close(losses.ctc_sum, wanted.detach(), rtol=1e-5, atol=1e-4)
    for name, value in gradients(model).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("silent", [[0], [1], [0, 2]])
def test_clips_without_a_transcript_learn_nothing_from_the_alignment(silent):
    """They would learn blanks, which nobody counts: their frames add neither loss nor gradient."""
    torch.manual_seed(0)
    model = SpeechModel(MODELS["codec2"])
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2", "A1T2"])], 96)
    batch.transcripts = [[] if i in silent else ids for i, ids in enumerate(batch.transcripts)]
    losses = Objective(model, ObjectiveConfig(ctc_weight=1.0, align_first=0.5))(batch, targets(batch), 0.0)
    losses.total.backward()
    found = gradients(model)
    model.zero_grad()
    heard = model.encode_frames(batch.inputs, batch.input_lengths, batch.frames).split(batch.frames)
    wanted = torch.zeros(())
    for h, ids in zip(heard, batch.transcripts, strict=True):
        if ids:
            scores = model.alignment_head(h).log_softmax(-1)[:, None]
            wanted = wanted + F.ctc_loss(scores, torch.tensor([ids]), (len(h),), (len(ids),), reduction="sum")
    count = sum(map(len, batch.transcripts))
    (wanted / count).backward()
    assert float(losses.ctc_count) == count == 4 * (3 - len(silent))
    torch.testing.assert_close(losses.ctc_sum, wanted.detach(), rtol=1e-5, atol=1e-4)
    for name, value in gradients(model).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_alignments_spell():
    letters = Alignment("letters")
    assert letters.size == 29 and letters.ids("Don't  go!") == letters.ids("don\u2019t go") == [6, 17, 16, 2, 22, 1, 9, 17]
    words = Alignment("words", ["one", "plus", "two"])
    assert words.size == 4 and words.ids("One plus two?") == [1, 2, 3] and words.ids("one plus three") == []
    tokens = Alignment("tokens", tokenizer=TOKENIZER)
    assert tokens.size == 257 and tokens.ids("ab") == [i + 1 for i in TOKENIZER.encode("ab")]
    none = Alignment("none")
    assert none.size == 0 and none.ids("one") == []
    with pytest.raises(UserError, match="needs the words"):
        Alignment("words")


def test_alignments_spell_by_sounds_as_well():
    plain, both = Alignment("words", ["one", "six"]), Alignment("words", ["one", "six"], sounds=True)
    assert plain.sound_size == 0 and both.size == plain.size == 3
    split = lambda text: ([i for i in both.ids(text) if i < 3], [i - 3 for i in both.ids(text) if i >= 3])  # noqa: E731
    words, sounds = split("One six")
    assert words == [1, 2] and len(sounds) == 3 + 4 and sounds[3] == sounds[6]
    assert split("six sick") == ([], [*sounds[3:], *sounds[3:6]])  # a word that is not known has its sounds alone
    assert split("far")[1] == [*split("fa")[1], split("red")[1][0]]  # a vowel before r is two sounds
    assert split("...") == ([], []) and both.ids("don't") == both.ids("don\u2019t")
    every = {i for text in ("church judge toy cow bath the vision hello", "young king ago") for i in split(text)[1]}
    assert min(every) > 0 and max(every) < both.sound_size  # 0 is the blank
