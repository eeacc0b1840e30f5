"""Reads the tokenizer beside external weights; refuses one that, by the other files, belongs to another model.

Sources: `tokenizer_config.json` (`added_tokens_decoder`, `eos_token`, `bos_token`), `config.json` and `generation_config.json`
(`eos_token_id`, `bos_token_id`) as transformers writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni.checkpoint.places import CONFIG
from omni.convert.contract import check_tokenizer
from omni.errors import UserError
from omni.text import Tokenizer

WORDS, GENERATION = "tokenizer_config.json", "generation_config.json"

COMPANIONS = (GENERATION, WORDS, "special_tokens_map.json")
"""Small files that are kept with an imported model (under `extra`) and written again on export."""

SPARE_ROWS, SPARE_SHARE = 1024, 20
"""Rows of a table that may be without a token: this number, or a twentieth of the table.

Tables are filled up to multiples of 64 to 1,024 (128 for each of eight devices; Qwen2.5 leaves 271 or 399 of about 152,000
empty), and a few families keep some for later (DeepSeek's Llamas 2,385 of 102,400). Other families' tokenizers are further
away: Llama 3's leaves 16 % of Qwen2.5's table, Mistral's 78 %.
"""


def read_tokenizer(
    path: Path, size: int, folder: Path, files: Mapping[str, Mapping[str, Any]], *, named: bool = False
) -> Tokenizer:
    """The tokenizer of a model whose text table has `size` rows.

    Args:
        path: a tokenizer.json.
        folder: the model's, for messages.
        files: its `config.json` and `COMPANIONS`, those that exist.
        named: the user has named this file explicitly; it may then leave most of the table unused.

    Raises:
        UserError: the file is missing or broken, or it is another model's by what the other files say.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; give the model's tokenizer.json with --tokenizer")
    words = Tokenizer.from_file(path)
    check_tokenizer(words, size, path)
    spare = size - len(words)
    if spare > max(SPARE_ROWS, size // SPARE_SHARE) and not named:
        raise UserError(
            f"{path} has {len(words)} tokens, and the model's table {size} rows, {spare} of which would never be used; is it "
            "another model's tokenizer? Where it is the right one all the same, name it with --tokenizer"
        )
    _check_added(words, path, folder / WORDS, files.get(WORDS, {}))
    for key, what in (("eos", "end"), ("bos", "beginning")):
        _check_special(words, path, folder, files, key, what)
    return words


def _check_added(words: Tokenizer, path: Path, where: Path, said: Mapping[str, Any]) -> None:
    """UserError for an added token that the tokenizer lacks or has under another id."""
    added = said.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(number.isascii() and number.isdigit() for number in added):
        raise UserError(f"{where}: added_tokens_decoder does not go from ids to tokens; fetch the file again")
    for number, token in added.items():
        content, found = _content(token, where, "added_tokens_decoder"), _token(words, int(number))
        if found != content:
            other = "has none" if found is None else f"calls it {found!r}"
            raise UserError(
                f"{where} calls token {number} {content!r}, and {path} {other}: they are of two models; fetch both again"
            )


def _check_special(
    words: Tokenizer, path: Path, folder: Path, files: Mapping[str, Mapping[str, Any]], key: str, what: str
) -> None:
    """UserError where the files do not agree on the token of the end (`eos`) or the beginning (`bos`)."""
    settings = _ids(files.get(CONFIG, {}).get(f"{key}_token_id"))
    for number in settings if key == "eos" else ():
        if _token(words, number) is None:
            raise UserError(
                f"{path} has no token {number}, which {CONFIG} calls the {what} ({key}_token_id); it is another model's"
            )
    token = files.get(WORDS, {}).get(f"{key}_token")
    if token is None:
        return
    content = _content(token, folder / WORDS, f"{key}_token")
    named = words.inner.token_to_id(content)
    if named is None:
        raise UserError(
            f"{folder / WORDS} calls {content!r} the {what} ({key}_token), and {path} has no such token: they are of two "
            "models; fetch both again"
        )
    # A model that was fine-tuned often names its end tokens in generation_config.json alone.
    if settings and named not in {*settings, *_ids(files.get(GENERATION, {}).get(f"{key}_token_id"))}:
        shown = ", ".join(f"{i} ({_token(words, i)!r})" for i in settings)
        raise UserError(
            f"{folder / WORDS} calls {content!r} the {what} ({key}_token), token {named} of {path}, and {folder / CONFIG} has "
            f"{key}_token_id {shown}: are they of one model? Fetch both again, or fix the one that is wrong"
        )


def _content(token: Any, where: Path, key: str) -> str:
    """The text of a token, which is stored as a string or as `{"content": ...}`."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise UserError(f"{where}: {key} holds {token!r}, which is no token; fetch the file again")
    return content


def _ids(value: Any) -> list[int]:
    """One id, several, or none."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and not isinstance(i, bool)]


def _token(words: Tokenizer, number: int) -> str | None:
    """The token of an id, None where there is none."""
    return words.inner.id_to_token(number) if 0 <= number < 2**32 else None
