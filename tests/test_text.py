"""The tokenizer: every text comes back."""

from __future__ import annotations

import types

import pytest
import tokenizers
from tokenizers import models

from omni.errors import RoomError, UserError
from omni.text import Tokenizer


@pytest.mark.parametrize("text", ["", "six", "minus two", "naïve café", "数字 7", "a\nb\t c", "🎤"])
def test_bytes_say_every_text(text, tmp_path):
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and all(0 <= i < 256 for i in ids)
    assert tokenizer.decode(ids) == text
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.from_file(tmp_path / "tokenizer.json").encode(text) == ids


@pytest.mark.parametrize("text, place", [("\ud800", 0), ("half a \udc41 pair", 7)])
def test_half_a_surrogate_pair_is_refused(text, place):
    with pytest.raises(UserError, match=rf"character {place} of the text is .*, half of a surrogate pair"):
        Tokenizer.bytes().encode(text)


def test_what_cannot_fit_is_refused_unread(monkeypatch):
    tokenizer = Tokenizer.bytes()
    assert len(tokenizer.encode("a" * 2048, most=512)) == 2048
    vocabulary = tokenizer.inner.get_vocab(True)
    monkeypatch.setattr(tokenizer, "inner", types.SimpleNamespace(get_vocab=lambda with_added_tokens: vocabulary))
    with pytest.raises(RoomError, match="has 5000000 characters, more than the model's 512 positions can hold: shorten it"):
        tokenizer.encode("word " * 1_000_000, most=512)


def test_a_long_token_makes_room():
    """A text of many characters may have few tokens."""
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a" * 100: 0, "u": 1}, unk_token="u")))
    assert tokenizer.encode("a" * 100, most=1) == [0]
    with pytest.raises(RoomError):
        tokenizer.encode("a" * 401, most=1)
