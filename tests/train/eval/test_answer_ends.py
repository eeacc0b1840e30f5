"""Where a tokenizer pads by its end of sequence: the end of every answer is trained all the same, and padding never is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers

from omni.layout import IGNORE
from tests.convert.hub_toys import edit_config, save_text, text_model
from train.commands.models import run_convert as main
from train.config.sections import ModelSection
from train.data.batching.examples import ExampleMaker
from train.data.batching.loader import Pipeline, StepLoader
from train.data.config import PackingConfig
from train.data.rows.row import Row, RowTurn
from train.data.sources.mixture import Mixture, TaskMixture
from train.trainer.initial_model import build_initial

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
ANSWERS = ("yes", "no, not at all", "what is said ends")


class Said:
    """Questions and the answers to them, over and over."""

    name, size, repeats = "said", len(ANSWERS), False

    def identity(self, index: int) -> int:
        return index

    def row(self, index: int) -> Row:
        return Row((RowTurn(question_text="really?", answer_text=ANSWERS[index]),), source=self.name, where=str(index))


def mistral_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Of Mistral's kind (BPE over bytes, spaces as underscores), padding by its end, as its recipes have it."""
    pieces = [UNKNOWN, BEGIN, END, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    inner = Inner(models.BPE(vocabulary, [], unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END, pad_token=END
    )


@pytest.fixture
def mistral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's folder of a small Mistral whose pad is its end."""
    monkeypatch.setattr("os.fsync", lambda handle: None)
    folder = save_text(text_model("mistral"), tmp_path / "mistral")
    mistral_tokenizer().save_pretrained(folder)
    edit_config(folder, pad_token_id=2)
    return folder


def test_the_end_of_every_answer_is_trained_and_padding_is_not(mistral: Path, tmp_path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(mistral)
    assert theirs.pad_token_id == theirs.eos_token_id == 2
    assert main([str(mistral), str(tmp_path / "omni"), "--keep_text", "--quiet"]) == 0
    initial = build_initial(ModelSection(init_from=str(tmp_path / "omni")), seed=0)
    layout, tokenizer = initial.model.config.layout, initial.tokenizer
    end, pad = layout.text.special("end"), layout.text.special("pad")
    assert len({end, pad, 2}) == 3 and tokenizer.inner.token_to_id(END) == 2
    pipeline = Pipeline(
        Mixture([Said()], [1.0], seed=0),
        [TaskMixture({"T1T2": 1.0})],
        ExampleMaker(initial.model.config, tokenizer, initial.codec),
        PackingConfig(rows=2, length=96, buffer=4),
        seed=0,
    )
    batch = next(StepLoader(pipeline, 1))[0]
    tokens, targets = batch.tokens[:, -1], batch.targets[:, -1]
    assert batch.examples > 2 and batch.padding > 0
    assert (batch.targets[:, :-1] == IGNORE).all() and not (targets == pad).any()
    found = []
    for row in range(2):
        for number in batch.segments[row].unique():
            inside = batch.segments[row] == number
            trained = targets[row, inside & (targets[row] != IGNORE)]
            if (batch.task[row, inside] < 0).all():  # the unused rest
                assert (tokens[row, inside] == pad).all() and len(trained) == 0
                continue
            assert trained[-1] == end and (trained == end).sum() == 1
            found.append(tokenizer.decode(trained[:-1].tolist()))
            assert found[-1] == theirs.decode(trained[:-1])
            places = (inside & (targets[row] != IGNORE)).nonzero()[:, 0]
            assert torch.equal(tokens[row, places[1:]], trained[:-1])  # each is predicted from the one before it
    assert set(found) <= set(ANSWERS) and len(found) == batch.examples
