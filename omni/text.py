"""Encodes text to ids and decodes ids to text, through the `tokenizers` library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from omni.errors import RoomError, UserError
from omni.files import refuse_pointer
from omni.utils.remote import refuse_remote


class Tokenizer:
    """A tokenizer in the `tokenizer.json` format of Hugging Face; ids are the text stream's ordinary ids.

    No special token is added to a text: ends and starts of questions and answers are the layout's.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner

    @classmethod
    def bytes(cls) -> Tokenizer:
        """One id per byte of UTF-8 (256 ids): the nano model's tokenizer, which knows every text."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        inner = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        return cls(inner)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a `tokenizer.json`; UserError where it is missing or not one."""
        refuse_remote(path, "tokenizer")
        if not Path(path).is_file():
            raise UserError(f"tokenizer {path} does not exist; a model folder holds a tokenizer.json")
        refuse_pointer(path)
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises a bare Exception for any error in the file
            raise UserError(f"tokenizer {path} cannot be read ({error}); it must be a Hugging Face tokenizer.json") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a `tokenizer.json`; OSError where the disk is full or the place cannot be written."""
        Path(path).write_text(self.inner.to_str(pretty=True), encoding="utf-8")

    def __len__(self) -> int:
        return self.inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of a text.

        Args:
            most: ids that are of use at all; a text that must have four times as many is refused before it is encoded, which
                would take seconds.

        Raises:
            RoomError: the text is far too long for that.
            UserError: it has half of a surrogate pair, which no UTF-8 can hold.
        """
        if most is not None and len(text) > 4 * most:
            longest = max(map(len, self.inner.get_vocab(with_added_tokens=True)), default=1)
            if len(text) > 4 * most * longest:
                raise RoomError(
                    f"the text has {len(text)} characters, more than the model's {most} positions can hold: shorten it"
                )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"character {error.start} of the text is {text[error.start]!a}, half of a surrogate pair; decode the text again"
            ) from error
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=False)
