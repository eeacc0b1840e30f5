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
from train.data.batching.batch import Batch
from train.data.batching.examples import Alignment
from train.objective.config import ObjectiveConfig
from train.objective.objective import Objective, targets


def ctc(model: SpeechModel, batch: Batch) -> torch.Tensor:
    """torch's, clip by clip, of those with a transcript; of two spellings the first 5 times."""
    first, wanted = model.config.ctc, torch.zeros(())
    heard = model.encoder.run(batch.inputs, batch.input_lengths, batch.frames).split(batch.frames)
    for h, ids in zip(heard, batch.transcripts, strict=True):
        logits = model.alignment_head(h)
        parts = [(1.0, logits, ids)]
        if model.config.ctc_sounds:
            parts = [(5.0, logits[:, :first], [i for i in ids if i < first]),
                     (1.0, logits[:, first:], [i - first for i in ids if i >= first])]  # fmt: skip
        for weight, part, own in parts:
            if own:
                scores = part.log_softmax(-1)[:, None]
                wanted = wanted + weight * F.ctc_loss(scores, torch.tensor([own]), (len(h),), (len(own),), reduction="sum")
    return wanted


def test_alignment_loss_is_torch_ctc():
    torch.manual_seed(0)
    model = SpeechModel(MODELS["codec2"])
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2"])], 64)
    losses = Objective(model, ObjectiveConfig(ctc_weight=0.5))(batch, targets(batch))
    wanted = ctc(model, batch)
    torch.testing.assert_close(losses.ctc_sum, wanted.detach(), rtol=1e-5, atol=1e-4)
    plain_total = Objective(model)(batch, targets(batch)).total
    torch.testing.assert_close(losses.total, plain_total + 0.5 * wanted / 8, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "transcripts",
    [[[], [1, 2], [3, 4]], [[1, 2], [], []], [[1, 2, 24, 24], [22, 27, 23], [4]]],
    ids=["one", "two", "spellings"],
)
def test_clips_learn_their_own_transcript_alone(transcripts):
    """Without one they would learn blanks, which nobody counts: their frames add neither loss nor gradient. Of two spellings
    the losses are summed."""
    torch.manual_seed(0)
    spellings = max(map(max, filter(None, transcripts))) > 20
    model = SpeechModel(replace(MODELS["codec2"], ctc_sounds=7 if spellings else 0))
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2", "A1T2"])], 96)
    batch.transcripts = transcripts
    losses = Objective(model, ObjectiveConfig(ctc_weight=1.0, ctc_words=5.0, align_first=0.5))(batch, targets(batch), 0.0)
    losses.total.backward()
    found = gradients(model)
    model.zero_grad()
    wanted, count = ctc(model, batch), sum(map(len, transcripts))
    (wanted / count).backward()
    assert float(losses.ctc_count) == count
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
