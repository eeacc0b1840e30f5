"""An evaluation of a turn head: questions with pauses, the grammar, and figures of given probabilities."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from digits.asking import paused_questions
from digits.options import SpokenDigitsConfig
from digits.spoken import SpokenDigits, whole_question
from torch import Tensor

from omni.checkpoint.folder import save_folder
from omni.codec.registry import load_if_given
from omni.config import preset
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.generate.listening import EndRule, TurnListener
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.train.eval.test_eval import run
from train.eval.turn_ends import SILENCE, PausedQuestion, decided, figures_of

DIGITS = SpokenDigitsConfig()
NANO = replace(preset("nano"), encoder=replace(preset("nano").encoder, mode="chunked", layers=1), turn=True)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("what is seven plus four", True), ("seven minus four", True), ("say seven", True),
        ("read back one two three four", True),
        ("what is", False), ("what is seven plus", False), ("what is seven", False), ("seven", False), ("say", False),
        ("read back one two three four five", False), ("say seven plus two", False), ("", False),
    ],
)  # fmt: skip
def test_the_grammar_says_what_could_be_a_whole_question(text: str, whole: bool) -> None:
    assert whole_question(DIGITS, text) == whole


def test_questions_with_pauses_have_their_times() -> None:
    source = SpokenDigits(DIGITS, load_if_given("codec2", None), 0)  # type: ignore[arg-type]
    some, again = paused_questions(source, 6), paused_questions(source, 6)
    for one, same in zip(some, again, strict=True):
        assert one.voice in DIGITS.held_out and one.sound.equal(same.sound)
        start, end = (round(16_000 * second) for second in one.pause)
        assert not one.sound[start:end].any() and one.sound[start - 400 : start].any() and one.sound[end : end + 400].any()
        assert not one.sound[round(16_000 * one.end) :].any() and len(one.sound) == round(16_000 * (one.end + SILENCE))
        assert one.kinds[0] in ("more", "whole") and one.kinds[1] in ("closed", "open")
        assert one.kinds[2:] == (("clear",) if one.kinds[:2] == ("more", "closed") else ())
    assert {one.kinds[1] for one in some[::2]} == {"closed"}  # nothing follows a sum


class Listener:
    """What `decided` asks of one: frames of 40 ms, chunks of 320."""

    class encoder:
        config = WhisperConfig(mode="chunked", hop=320)


def asked(kind: str = "more") -> PausedQuestion:
    return PausedQuestion("", "", (kind, "closed"), torch.zeros(16_000 * 7), (1.0, 2.0), 3.0)


def probabilities(*sure: int) -> Tensor:
    found = torch.zeros(175, 2)
    found[list(sure), 1] = 1.0
    return found


def test_figures_of_given_probabilities() -> None:
    rule, listener = EndRule(0.5, 2), Listener()
    # Frames 74 and 75: the second ends at 3.04 s, and is there with the chunk that ends at 3.2 s.
    assert decided(listener, asked(), probabilities(74, 75), rule) == (False, pytest.approx(0.2))  # type: ignore[arg-type]
    assert decided(listener, asked(), probabilities(30, 31, 80, 81), rule) == (True, pytest.approx(0.52))  # type: ignore[arg-type]
    assert decided(listener, asked(), probabilities(40, 60), rule) == (False, pytest.approx(4.0))  # type: ignore[arg-type]
    given = [probabilities(74, 75), probabilities(30, 31, 80, 81), probabilities(40, 60), probabilities(74, 75)]
    found = figures_of(listener, [asked(), asked(), asked(), asked("whole")], given, rule)  # type: ignore[arg-type]
    assert list(found) == ["more", "whole", "closed"] and found["more"].questions == 3
    assert found["more"].cut_off == found["more"].missed == pytest.approx(1 / 3)
    assert found["more"].p50 == pytest.approx(0.52) and found["whole"].p95 == pytest.approx(0.2)


@pytest.mark.long
def test_the_command_writes_table_figures_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    save_folder(tmp_path / "model", NANO, SpeechModel(NANO).state_dict(), Tokenizer.bytes())
    (tmp_path / "config.yaml").write_text(
        "budget: {steps: 1}\nmodel: {preset: nano}\ndata: {sources: [{kind: spoken-digits}]}\n"
    )
    out = tmp_path / "out"
    assert run("--turn_ends", tmp_path / "model", "--out", out, "--limit", 4, "--chunk_ms", 160) == 0
    assert "ends of 4 questions with a pause" in capsys.readouterr().out
    figures = json.loads((out / "turn_ends.json").read_text())
    assert figures["chunk_ms"] == 160 and list(figures["eagerness"]) == ["low", "medium", "high"]
    assert (out / "turn_ends.png").is_file() and "delay p95" in (out / "turn_ends.md").read_text().splitlines()[0]
    bare = replace(NANO, turn=False)
    save_folder(tmp_path / "bare", bare, SpeechModel(bare).state_dict(), Tokenizer.bytes())
    assert TurnListener.from_folder(tmp_path / "bare") is None
    with pytest.raises(UserError, match="has no turn head: train one with model.turn"):
        run("--turn_ends", tmp_path / "bare", "--out", out)
    (tmp_path / "config.yaml").write_text(
        "budget: {steps: 1}\nmodel: {preset: nano}\ndata: {sources: [{kind: stored, path: somewhere}]}\n"
    )
    with pytest.raises(UserError, match="has no source of kind spoken-digits: name --voices that training did not have"):
        run("--turn_ends", tmp_path / "model", "--out", out)
    with pytest.raises(UserError, match="en-us\\+Mikey"):
        run("--turn_ends", tmp_path / "model", "--out", out, "--voices", "en-us+Mikey")
    assert run("--turn_ends", tmp_path / "model", "--out", out, "--limit", 2, "--voices", "en-us+Mike,en-gb+m1") == 0
