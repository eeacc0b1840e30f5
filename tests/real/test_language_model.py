"""A converted instruct model beside transformers': the same answers in its own chat format, and the same folder out again.

`REAL=folder make test-real`, with the language model in `folder/smollm`; skipped without it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infer.quantize import compare, own_text
from omni.convert.omni_folder import quantize_folder
from omni.generate.speech_lm import SpeechLM
from train.commands.models import run_convert

MODEL = Path(os.environ.get("REAL", "nowhere")) / "smollm"
pytestmark = [pytest.mark.long, pytest.mark.skipif(not MODEL.is_dir(), reason="REAL names no folder of parts")]

CLOSE = 1e-3  # logits that sums in another order tell apart
TOKENS = 24
THINGS = "France,a rainbow,the moon,sourdough bread,gravity,Japan,a violin,photosynthesis,chess,an echo,the sea,a prime number,"
THINGS += "Kenya,vaccines,a poem,the wind,a triangle,Peru,a volcano,honey"
ASKED = (
    "What is the most important thing about {}?;Tell me about {} in one sentence.;Write a short line on {}.;Why do people care "
)
ASKED += "about {}?;Name two facts about {}."
QUESTIONS = [form.format(thing) for thing in THINGS.split(",") for form in ASKED.split(";")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("real") / "model"
    assert run_convert([str(MODEL), str(place), "--keep_text", "--quiet"]) == 0
    return place


@torch.no_grad()
def test_a_hundred_questions_are_answered_as_transformers_answers_them(folder: Path) -> None:
    theirs: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    answers = SpeechLM.from_pretrained(folder).generate(QUESTIONS, "T1T2", max_tokens=TOKENS)
    words = AutoTokenizer.from_pretrained(MODEL)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        chat = [{"role": "user", "content": question}]
        asked = words.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = theirs.generate(**asked, max_new_tokens=TOKENS, do_sample=False)[0, asked["input_ids"].shape[1] :].tolist()
        own = [*answer.tokens, *[words.eos_token_id] * (answer.ended == "end")]
        if own != out:
            same = next(n for n, (a, b) in enumerate(zip(own, out, strict=False)) if a != b)
            before = torch.cat([asked["input_ids"], torch.tensor([out[:same]], dtype=torch.long)], 1)
            best = theirs(before).logits[0, -1].topk(2).values
            assert best[0] - best[1] < CLOSE, (question, answer.text, words.decode(out))


def test_the_folder_goes_out_as_it_came(folder: Path, tmp_path: Path) -> None:
    assert run_convert([str(folder), str(tmp_path / "again"), "--kind", "hf", "--quiet"]) == 0
    old, new = (AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32) for place in (MODEL, tmp_path / "again"))
    state, wanted = new.state_dict(), old.state_dict()
    assert state.keys() == wanted.keys() and all(state[name].equal(wanted[name]) for name in wanted)
    before, after = (json.loads((place / "config.json").read_text()) for place in (MODEL, tmp_path / "again"))
    assert {key: after.get(key) for key in before} == before
    assert new.generation_config.to_dict() == old.generation_config.to_dict()
    old, new = (AutoTokenizer.from_pretrained(place) for place in (MODEL, tmp_path / "again"))
    chat = [{"role": "user", "content": "Who are you?"}]
    assert (new.eos_token, new.apply_chat_template(chat)) == (old.eos_token, old.apply_chat_template(chat))


def test_int8_is_near_to_float32(folder: Path, tmp_path: Path) -> None:
    quantize_folder(folder, tmp_path / "int8")
    full, ours = (SpeechLM.from_pretrained(f, dtype="float32", kernels="reference") for f in (folder, tmp_path / "int8"))
    difference = compare(full, ours, torch.tensor(full.tokenizer.encode(own_text())[:4096]))
    assert difference.kl < 0.01 and difference.same > 0.93, difference
