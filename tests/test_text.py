"""The tokenizer: every text comes back."""

from __future__ import annotations

import pytest

from omni.errors import UserError
from omni.text import Tokenizer


@pytest.mark.parametrize("text", ["", "six", "minus two", "naïve café", "数字 7", "a\nb\t c", "🎤"])
def test_bytes_say_every_text(text, tmp_path):
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and all(0 <= i < 256 for i in ids)
    assert tokenizer.decode(ids) == text
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.from_file(tmp_path / "tokenizer.json").encode(text) == ids


def test_a_bad_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        Tokenizer.from_file(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.from_file(tmp_path / "bad.json")


@pytest.mark.parametrize("text, place", [("\ud800", 0), ("half a \udc41 pair", 7)])
def test_half_a_surrogate_pair_is_refused(text, place):
    with pytest.raises(UserError, match=rf"character {place} of the text is .*, half of a surrogate pair"):
        Tokenizer.bytes().encode(text)


def test_a_place_that_cannot_be_written_is_an_os_error(tmp_path):
    with pytest.raises(OSError):
        Tokenizer.bytes().save(tmp_path)
