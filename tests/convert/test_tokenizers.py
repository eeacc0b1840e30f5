"""The tokenizer beside somebody's weights: what transformers saves is taken, and another model's is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from omni.convert import mini_omni
from omni.convert.contract import TextConfig, read_tokenizer
from omni.convert.huggingface import read
from omni.errors import UserError
from omni.text import Tokenizer
from tests.convert.hub_toys import VOCABULARY, edit_config, save_text, text_model
from tests.convert.mini_omni_toys import save, settings_of, state_of
from train.commands.models import run_convert as main

BEGIN, END = 256, 257
ADDED = {str(BEGIN): {"content": "<begin>", "special": True}, str(END): {"content": "<end>", "special": True}}
"""As versions 4 of transformers write it."""


def lm(folder: Path, **ids: Any) -> Path:
    """A language model with the tokenizer's files as transformers saves them."""
    save_text(text_model("qwen2"), folder)
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<begin>", eos_token="<end>"
    )
    words.save_pretrained(folder)
    edit_config(folder, **({"bos_token_id": BEGIN, "eos_token_id": END} | ids))
    return folder


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        read(folder)
    return str(error.value)


@pytest.mark.parametrize("ids", [{}, {"eos_token_id": [5, END]}, {"eos_token_id": None, "bos_token_id": None}], ids=str)
def test_what_transformers_saves_is_taken(tmp_path, ids):
    folder = lm(tmp_path / "lm", **ids)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    words = read(folder).tokenizer
    assert words is not None and words.encode("hé<end>") == theirs.encode("hé<end>")
    edit(folder / "tokenizer_config.json", added_tokens_decoder=ADDED, bos_token=None, eos_token=ADDED[str(END)])
    read(folder)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"added_tokens_decoder": ADDED | {"256": {"content": "<s>"}}}, "calls token 256 '<s>', and * calls it '<begin>'"),
        ({"added_tokens_decoder": ADDED | {"260": {"content": "<s>"}}}, "calls token 260 '<s>', and * has none"),
        ({"added_tokens_decoder": {"256": 3}}, "added_tokens_decoder holds 3, which is no token"),
        ({"eos_token": "</s>"}, "calls '</s>' the end (eos_token), and * has no such token"),
        ({"eos_token": "<begin>"}, "calls '<begin>' the end (eos_token), token 256 of *, and * has eos_token_id 257 ('<end>')"),
    ],
    ids=str,
)
def test_files_that_contradict_each_other_are_named(tmp_path, changes, words):
    folder = lm(tmp_path / "lm")
    edit(folder / "tokenizer_config.json", **changes)
    said, at = refused(folder), 0
    assert said.startswith(f"{folder / 'tokenizer_config.json'}") and "\n" not in said
    for part in words.split("*"):
        assert part in said[at:]
        at = said.index(part, at)
    if "*" in words:
        assert str(folder / "tokenizer.json") in said
    if "_id " in words:
        assert str(folder / "config.json") in said


@pytest.mark.parametrize("number", [-1, 260, 10**20])
def test_an_end_that_is_no_token_is_named(tmp_path, number):
    assert f"has no token {number}, which config.json calls the end" in refused(lm(tmp_path / "lm", eos_token_id=number))


def test_the_end_may_be_one_that_only_generation_knows(tmp_path):
    folder = lm(tmp_path / "lm", eos_token_id=BEGIN)
    assert "eos_token_id 256 ('<begin>')" in refused(folder)
    edit(folder / "generation_config.json", eos_token_id=[BEGIN, END])
    read(folder)


@cache
def counting(tokens: int) -> str:
    """A tokenizer.json of so many tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    more = (f"unused {i}" for i in range(256, tokens))
    inner = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, *more])}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return inner.to_str()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "tokens, rows, fits",
    [
        (151665, 151936, True),  # Qwen2.5-0.5B
        (151665, 152064, True),  # Qwen2.5-7B
        (256, VOCABULARY, True),
        (128256, 151936, False),  # Llama 3's beside Qwen2.5's weights
        (32768, 151936, False),  # Mistral's
    ],
)
def test_a_vocabulary_far_from_the_tables_is_another_models(tmp_path, tokens, rows, fits):
    path = tmp_path / "tokenizer.json"
    path.write_text(counting(tokens))
    if fits:
        assert len(read_tokenizer(path, rows, tmp_path, {})) == tokens
        return
    with pytest.raises(UserError, match=f"table.* {rows} rows"):
        read_tokenizer(path, rows, tmp_path, {})


def test_a_small_tokenizer_is_taken_where_it_is_named(tmp_path):
    settings = settings_of("released")
    folder = save(tmp_path / "theirs", settings, state_of(settings))
    Tokenizer.bytes().save(folder / "tokenizer.json")
    with pytest.raises(UserError, match="has 256 tokens, and the model's table 151936 rows, 151680 of which .*--tokenizer"):
        mini_omni.read(folder)
    assert main([str(folder), str(tmp_path / "ours"), "--tokenizer", str(folder / "tokenizer.json"), "--quiet"]) == 0


def test_a_named_tokenizer_is_held_against_the_folders_files(tmp_path):
    folder = lm(tmp_path / "lm")
    named = tmp_path / "other.json"
    Tokenizer.bytes().save(named)
    with pytest.raises(UserError, match=r"no token 257.*another model's"):
        read(folder, named)
    (folder / "tokenizer.json").rename(named)
    assert isinstance(read(folder, named).config, TextConfig)
