"""A converted instruct model beside transformers': the same answers in its own chat format, and the same folder out again.

`REAL=folder make test-real`, where the folder holds `smollm` (docs/real.md says how it comes there); skipped without it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from omni.generate.speech_lm import SpeechLM
from train.commands.models import run_convert

PARTS = Path(os.environ.get("REAL", "nowhere"))
pytestmark = [pytest.mark.long, pytest.mark.skipif(not (PARTS / "smollm").is_dir(), reason="REAL names no folder of parts")]

CLOSE = 1e-3
"""Logits that are as good as equal: sums in another order tell them apart."""

TOKENS = 24
THINGS = (
    "France", "a rainbow", "the moon", "sourdough bread", "gravity", "Japan", "a violin", "photosynthesis", "chess", "an echo",
    "the sea", "a prime number", "Kenya", "vaccines", "a poem", "the wind", "a triangle", "Peru", "a volcano", "honey",
)  # fmt: skip
ASKED = ("What is the most important thing about {}?", "Tell me about {} in one sentence.", "Write a short line on {}.",
         "Why do people care about {}?", "Name two facts about {}.")  # fmt: skip
QUESTIONS = [form.format(thing) for thing in THINGS for form in ASKED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("real") / "model"
    assert run_convert([str(PARTS / "smollm"), str(place), "--keep_text", "--quiet"]) == 0
    return place


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(PARTS / "smollm", dtype=torch.float32).eval()


@torch.no_grad()
def test_a_hundred_questions_are_answered_as_transformers_answers_them(folder: Path, theirs: Any) -> None:
    lm, words = SpeechLM.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(PARTS / "smollm")
    answers, differing = lm.generate(QUESTIONS, "T1T2", max_tokens=TOKENS), 0
    for question, answer in zip(QUESTIONS, answers, strict=True):
        chat = [{"role": "user", "content": question}]
        asked = words.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        start = asked["input_ids"].shape[1]
        out = theirs.generate(**asked, max_new_tokens=TOKENS, do_sample=False, repetition_penalty=1.0)[0]
        wanted = [token for token in out[start:].tolist() if token != words.eos_token_id]
        own = list(answer.tokens)[: len(wanted)]
        if own != wanted:
            place = next((n for n, (a, b) in enumerate(zip(own, wanted, strict=False)) if a != b), len(own))
            best = theirs(out[None, : start + place]).logits[0, -1].topk(2).values
            assert float(best[0] - best[1]) < CLOSE, (question, answer.text, words.decode(wanted))
            differing += 1
        assert answer.ended == ("end" if len(wanted) < TOKENS else "max_tokens") or own != wanted, (question, answer)
    assert differing <= 5


def test_the_folder_goes_out_as_it_came(folder: Path, theirs: Any, tmp_path: Path) -> None:
    assert run_convert([str(folder), str(tmp_path / "again"), "--kind", "hf", "--quiet"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    state, wanted = again.state_dict(), theirs.state_dict()
    assert state.keys() == wanted.keys() and all(state[name].equal(wanted[name]) for name in wanted)
    before, after = (json.loads((place / "config.json").read_text()) for place in (PARTS / "smollm", tmp_path / "again"))
    assert {key: after.get(key) for key in before} == before
    chat = [{"role": "user", "content": "Who are you?"}]
    old, new = (transformers.AutoTokenizer.from_pretrained(place) for place in (PARTS / "smollm", tmp_path / "again"))
    assert old.apply_chat_template(chat, tokenize=False) == new.apply_chat_template(chat, tokenize=False)
    assert old.eos_token == new.eos_token
    assert again.generation_config.eos_token_id == theirs.generation_config.eos_token_id
