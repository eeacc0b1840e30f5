"""Text that comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from omni.generate.results import TextStream
from omni.text import Tokenizer


def words() -> Tokenizer:
    """A tokenizer that writes a token differently at the beginning: no space there."""
    vocabulary = {"\u2581one": 0, "\u2581two": 1, "more": 2, "\u2581": 3, "<unk>": 4}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return Tokenizer(inner)


TEXTS = ["plain", "grüße, 你好", "e\u0301 \U0001f469\u200d\U0001f680!", "\ufffd odd", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_bytes_join_to_the_text_and_hold_half_characters_back(text: str) -> None:
    tokenizer = Tokenizer.bytes()
    ids, stream, shown = tokenizer.encode(text), TextStream(tokenizer), ""
    for i, token in enumerate(ids):
        shown += stream.push(token)
        assert text.startswith(shown)
        if not text.startswith("\ufffd"):
            whole = tokenizer.decode(ids[: i + 1])
            assert shown == whole.rstrip("\ufffd")
    assert shown + stream.finish() == text and stream.finish() == ""


def test_pieces_of_words_keep_their_spaces() -> None:
    tokenizer, ids = words(), [0, 1, 2, 0, 3, 1]
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert pieces[0] == "one" and pieces[1] == " two" and "".join(pieces) == tokenizer.decode(ids)


def test_a_broken_character_at_the_end_is_shown_at_last() -> None:
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode("añ")[:2]
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in ids] == ["a", ""]
    assert stream.finish() == "\ufffd"


def byte_fallback() -> Tokenizer:
    """A tokenizer of which half a character in a run of bytes spoils the whole run: each byte is then one of its own."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={f"<0x{i:02X}>": i for i in range(256)}, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(inner)


@pytest.mark.parametrize("tokenizer", [Tokenizer.bytes(), byte_fallback()], ids=["bytes", "fallback"])
@pytest.mark.parametrize("text", [*TEXTS, "你好世界 \U0001f680\U0001f469\u200d\U0001f680 ñandú", "éé" * 9])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_tokens_of_counts_as_a_scan_of_every_prefix_and_decodes_few(
    tokenizer: Tokenizer, text: str, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, ids = TextStream(tokenizer), tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    for token in ids[: len(ids) - missing]:
        stream.push(token)
    stream.finish()
    lengths = [len(tokenizer.decode(stream.ids[:n])) for n in range(len(stream.ids) + 1)]
    calls: list[Sequence[int]] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: calls.append(ids) or decode(ids))
    for characters in range(lengths[-1] + 2):
        wanted = max(n for n, length in enumerate(lengths) if length <= characters)
        calls.clear()
        assert stream.tokens_of(characters) == wanted
        assert len(calls) <= 5
