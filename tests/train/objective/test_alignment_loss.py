"""What is spelt for the alignment loss, and that loss: torch's CTC, of one spelling or two, of clips that have a transcript."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from omni.config import ProjectorConfig
from omni.cpu.int8 import to_int8
from omni.errors import UserError
from omni.model import reading
from omni.model.attention import PackedRows
from omni.model.decoder import seen_first
from omni.model.projector import Projector
from omni.model.reading import choose, log_probabilities, readings
from omni.model.speech_model import SpeechModel
from omni.tasks import Turn, prompt
from tests.train.data.toys import TOKENIZER
from tests.train.objective.test_objective import MODELS, gradients, make_examples, pack
from train.data.batching.batch import Batch
from train.data.batching.examples import Alignment
from train.data.rows.row import Row, RowTurn
from train.eval.answers import EvalQuestion, read_questions
from train.eval.held_out import Item
from train.objective import cross_entropy
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


SETTINGS = {"layers": 2, "heads": 4, "mlp": 24}
HEARING = replace(
    MODELS["codec2"],
    projector=ProjectorConfig("transformer", hidden=40, stack=2, settings=SETTINGS),
    decoder=replace(MODELS["codec2"].decoder, combine="sum"),
    ctc="tokens",
)


def tokens_ctc(model: SpeechModel, features: torch.Tensor, counts: list[int], transcripts: list[list[int]]) -> torch.Tensor:
    """torch's CTC of the whole log-softmax of the head's logits."""
    head, total = model.alignment_head, torch.zeros(())
    x, rows = (
        F.normalize(features, dim=-1) * features.shape[1] ** 0.5,
        F.normalize(model.decoder.text_embedding.weight.detach()),
    )
    scores = torch.cat([head.blank(x), x @ rows.T * head.log_temperature.exp()], 1).log_softmax(-1).split(counts)
    for own, ids in zip(scores, transcripts, strict=True):
        if ids:
            sizes = (len(own),), (len(ids),)
            total = total + F.ctc_loss(own[:, None], torch.tensor([ids]), *sizes, reduction="sum", zero_infinity=True)
    return total


@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_features_read_as_tokens_are_torch_ctc_and_the_decoder_rests(chunk, monkeypatch):
    """Blanks, a repeated token, the last id, a clip without transcript and one too short for its own (3 features)."""
    torch.manual_seed(0)
    model = SpeechModel(HEARING).eval()
    monkeypatch.setattr(model.decoder, "forward", None)
    with torch.no_grad():
        model.alignment_head.log_temperature.fill_(0.5)
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2", "A1T2", "A1T1"])], 128)
    batch.transcripts = [[1] * 9, [28, 28, 3], [], [5, 3, 28, 6]]
    config = ObjectiveConfig(ctc_weight=1.0, align_first=0.5, chunk=chunk)
    objective = Objective(model, config)
    losses = objective(batch, targets(batch), 0.0)
    losses.total.backward()
    assert all(p.grad is not None for p in model.parameters())  # as DDP wants
    found = gradients(model)
    model.zero_grad()
    features = model.projector(model.encoder.run(batch.inputs, batch.input_lengths, batch.frames), batch.frames)
    wanted = tokens_ctc(model, features, [-(-n // 2) for n in batch.frames], batch.transcripts)
    (wanted / 16).backward()
    torch.testing.assert_close(losses.ctc_sum, wanted.detach(), rtol=1e-5, atol=1e-5)
    for name, value in gradients(model).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
        assert not name.startswith("projector.") or value.abs().max() > 1e-6, name  # else the optimizer moves it by its noise
    idle = {id(p) for p in objective.idle(0.0)}
    unread = [*model.decoder.parameters(), model.alignment_head.silence]
    assert idle == {id(p) for p in unread} and not objective.idle(0.5)
    model.decoder.text_embedding.requires_grad_(False)  # its classifier is made once
    again = [objective(batch, targets(batch), 0.0).ctc_sum for _ in range(2)]
    torch.testing.assert_close(again, [losses.ctc_sum] * 2)


def test_the_sum_over_a_large_vocabulary_is_estimated_in_training_alone(monkeypatch):
    monkeypatch.setattr(cross_entropy, "SAMPLED", 6)
    torch.manual_seed(0)
    x, weight, labels = torch.randn(5, 8, requires_grad=True), torch.randn(40, 8), torch.tensor([3, 39])
    weight[39] = 3 * x[0].detach()  # so that it is nearly all of the first sum
    total = lambda: cross_entropy._log_sum(x, weight, labels, 64).exp()  # noqa: E731
    with torch.no_grad():
        torch.testing.assert_close(total(), (x @ weight.T).exp().sum(1))
    drawn = torch.stack([total() for _ in range(4000)])
    torch.testing.assert_close(drawn[:, 0], (x @ weight.T)[0].exp().sum().expand(4000), rtol=1e-4, atol=0)
    assert (drawn[:, 1:].std(0) > 0.1 * drawn[:, 1:].mean(0)).all()
    torch.testing.assert_close(drawn.mean(0), (x @ weight.T).exp().sum(1), rtol=0.06, atol=0)


def test_a_feature_is_read_like_the_token_whose_embedding_it_is():
    torch.manual_seed(0)
    model = SpeechModel(HEARING)
    decoder, layout = model.decoder, model.layout
    with torch.no_grad():  # as `omni.convert.grow` has it
        pads = layout.ids("pad")
        decoder.audio_embedding.weight[pads[:-1] + decoder.offsets[:, 0]] = 0
        decoder.text_embedding.weight[pads[-1]] = 0
    written = pads[None, :, None].repeat(1, 1, 3)
    spoken = written.clone()
    written[0, -1] = torch.tensor([4, 7, 2])
    index = torch.arange(3)[None]
    rows = decoder.text_embedding.weight[written[0, -1]]
    assert decoder.embed(written).equal(decoder.embed(spoken, rows, index))
    heard = model.projector(torch.randn(40, 16), [40]).square().mean().sqrt()
    torch.testing.assert_close(heard, decoder.text_embedding.weight.square().mean().sqrt(), rtol=0.1, atol=0)


def test_a_clip_hears_itself_alone():
    torch.manual_seed(0)
    projector, counts = SpeechModel(HEARING).eval().projector, [7, 12, 3, 7]
    frames = torch.randn(sum(counts), 16)
    alone = torch.cat([projector(clip, [len(clip)]) for clip in frames.split(counts)])
    torch.testing.assert_close(projector(frames, counts), alone, rtol=1e-5, atol=1e-6)
    changed = frames.clone()
    changed[0] += 1
    assert not torch.allclose(projector(changed, counts)[3], alone[3])  # and all of itself within its window
    whole = ProjectorConfig("transformer", hidden=40, stack=2, settings={**SETTINGS, "window": 0})
    for config, reach in ((replace(HEARING.projector, settings={**SETTINGS, "window": 2}), 4), (whole, 20)):
        projector, x = Projector(config, 16, 24).eval(), torch.randn(2 * 20, 16, requires_grad=True)
        projector(x, [30, 10])[9, 0].backward()
        felt = x.grad.abs().sum(1).view(20, 2).sum(1).nonzero().flatten()  # by two layers of the window
        assert felt.tolist() == [i for i in range(15) if abs(i - 9) <= reach]


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
    assert tokens.size == "tokens" and tokens.ids("?!") == []
    for text, typed in ((" Ab,  he said - don\u2019t!", "Ab, he said - don't!"), ("Is 7 odd", "Is 7 odd."), ("नमस्ते।", "नमस्ते।")):
        assert tokens.ids(text) == [i + 1 for i in TOKENIZER.encode(typed)]
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


def test_the_decoder_takes_the_tokens_that_the_head_reads():
    """Behind a clip's blanks, which it does not see; a clip in which nothing is heard is one silence."""
    torch.manual_seed(0)
    model = SpeechModel(HEARING)
    head, table = model.alignment_head, model.decoder.text_embedding.weight.detach()
    torch.nn.init.normal_(head.silence)
    head.log_temperature.data.fill_(1.0)
    ids, counts = [7, -1, 7, 7, 9, -1, 9, 9, -1, 3, -1, -1], [7, 3, 2]  # a token goes on in another clip
    head.blank.weight.data = 3 * F.normalize(torch.randn_like(head.blank.weight), dim=-1)
    features = torch.stack([head.blank.weight.detach()[0] if i < 0 else table[i] for i in ids]).requires_grad_()
    taken, left_out = model.read(features, [2 * n for n in counts])
    assert left_out.tolist() == [True] * 3 + [False] * 4 + [True] + [False] * 2 + [True, False]
    assert taken[~left_out].equal(torch.stack([*table[[7, 7, 9, 9, 9, 3]], head.silence]))
    assert model.heard(features, [2 * n for n in counts]) == [(7, 7, 9, 9), (9, 3), ()]
    assert model.hear(features, [2 * n for n in counts])[2].equal(head.silence[None])
    taken.sum().backward()
    assert features.grad is None and head.silence.grad is not None  # of every step, as DDP wants


@pytest.mark.parametrize("packed", [True, False])
def test_features_left_out_are_as_if_they_were_not_there(packed):
    torch.manual_seed(0)
    model = SpeechModel(HEARING)
    rows = [make_examples(model, ["A1T1", "A1A2"]), make_examples(model, ["T1A2", "A1T2"])]
    batch = pack(model, rows, 64)
    features = torch.randn(int(batch.feature_index.max()) + 1, model.config.decoder.width)
    left_out = torch.rand(len(features)) < 0.6
    where = {"segments": batch.segments, "packed": batch.packed if packed else None}
    whole = model(batch.tokens, features, batch.feature_index, left_out=left_out, **where).text
    unseen = F.pad(left_out, (0, 1))[batch.feature_index]
    assert 0 < int(unseen.sum()) < len(features)
    for r, row in enumerate(batch.segments):
        for number in row.unique():
            columns = (row == number) & ~unseen[r]
            alone = model(batch.tokens[r : r + 1, :, columns], features, batch.feature_index[r : r + 1, columns]).text[0]
            torch.testing.assert_close(whole[r, columns], alone, rtol=1e-5, atol=1e-5)


def test_what_is_not_seen_may_be_a_row_s_longest_segment():
    """On a GPU, where FlashAttention reads no further than that."""
    seen, packed = torch.arange(12)[None] % 6 == 0, PackedRows(torch.tensor([0, 4, 8, 12], dtype=torch.int32), 4)
    assert seen_first(seen, torch.arange(12)[None] // 4, packed)[2].longest >= int((~seen).sum())


def test_a_head_in_int8_hears_as_before():
    torch.manual_seed(0)
    model, features = SpeechModel(HEARING), torch.randn(30, HEARING.decoder.width)
    before = model.alignment_head(features)[1]
    to_int8(model)
    torch.testing.assert_close(model.alignment_head(features)[1], before, rtol=0.02, atol=0.02)


def test_frames_that_are_no_numbers_are_not_read():
    torch.manual_seed(0)
    model, features = SpeechModel(HEARING), torch.randn(9, HEARING.decoder.width)
    features[5, 0] = float("nan")
    first, second = model.hear(features, [8, 10])
    assert first.isfinite().all() and not second.isfinite().all()


def test_readings_have_torch_ctc_s_probabilities(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(reading, "WIDTH", 10_000)
    for name in ("MARGIN", "CLOSE"):
        monkeypatch.setattr(reading, name, 1e9)
    logits = torch.randn(6, 4).log_softmax(1)
    found = readings(*logits[:, 1:].topk(3), logits[:, 0])
    assert len(found) > 200
    for ids, score in found.items():
        loss = F.ctc_loss(logits[:, None], torch.tensor([[i + 1 for i in ids]]), [6], [len(ids)], reduction="sum")
        assert score == pytest.approx(-float(loss), abs=1e-5)
    assert sum(map(math.exp, found.values())) == pytest.approx(1)
    assert list(readings(logits[:, 1:] * math.nan, torch.ones(6, 3), logits[:, 0] * math.nan)) == [()]  # nothing was heard


def test_the_language_model_chooses_among_readings_that_sound_alike():
    torch.manual_seed(0)
    decoder = SpeechModel(HEARING).eval().decoder
    texts = [(7, 3), (5,), (7, 3, 9), (7, 9)]
    known = log_probabilities(decoder, texts)
    for ids, score in zip(texts, known, strict=True):
        columns = prompt(decoder.layout, Turn("T1T2", question=ids, system=None)).tokens[:, :-1]  # the last asks for an answer
        logs = decoder.text_logits(decoder(columns[None]))[0].log_softmax(-1)
        assert score == pytest.approx(logs[:-1].gather(1, columns[-1, 1:, None]).sum().item(), abs=1e-4)
    alike = {ids: -reading.PER_TOKEN * len(ids) for ids in texts}
    likeliest = texts[known.index(max(known))]
    assert choose(decoder, alike) == choose(decoder, alike | {(): -50.0}) == likeliest
    assert choose(decoder, alike | {(1, 1): 100.0}) == (1, 1) and choose(decoder, alike | {(): 100.0}) == ()


def test_an_evaluation_says_what_was_heard():
    torch.manual_seed(1)
    model, sound = SpeechModel(HEARING).eval(), torch.randn(8000)
    frames, counts = model.encoder.encode([sound])
    features = model.projector(frames, counts)
    (heard,) = model.heard(features, counts)
    (taken,) = model.hear(features, counts)
    assert heard and taken.equal(model.decoder.text_embedding.weight[list(heard)] / model.config.feature_factor)
    lm, row = SimpleNamespace(model=model, tokenizer=SimpleNamespace(decode=list)), Row((RowTurn("what?"),))
    items = [Item("A1T1", sound, "what?", None, None), Item("T1T2", "what?", "what?", None, None)]
    assert read_questions(lm, [EvalQuestion(0, row, item) for item in items]) == [list(heard), None]
