"""Chat formats of language models: what a template says is asked in columns, equal to transformers' own rendering."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from omni.convert.chat import read_chat
from omni.errors import UserError
from omni.layout import Layout
from omni.tasks import Turn, answer, example, join, prompt
from omni.text import Tokenizer

WORDS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|start|>", "<|stop|>", "<|eot|>")
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
DEFAULT = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
TEMPLATES = {
    "chatml": CHATML + ASK,
    "default system": DEFAULT + CHATML + ASK,
    "llama": "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|stop|>\n\n' }}"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == "
    "'assistant' %}{{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('no system message') }}{% endif %}{% endfor %}",
}


def tokenizer() -> Tokenizer:
    made = Tokenizer.bytes()
    made.inner.add_special_tokens(list(WORDS))
    return made


def layout_of(template: str) -> tuple[Layout, transformers.PreTrainedTokenizerFast]:
    words = tokenizer()
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    found = read_chat(names, words)
    assert found is not None
    layout = Layout.build([8, 8], len(words), specials=8)
    layout = replace(layout, streams=(*layout.audio, replace(layout.text, end=found[1])), chat=found[0])
    return layout, transformers.PreTrainedTokenizerFast(tokenizer_object=words.inner, **names)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_columns_are_what_the_template_says(name: str, system: str) -> None:
    layout, theirs = layout_of(TEMPLATES[name])
    texts = ["How are you?", "Fine, and you?", "Well."]
    ids = [theirs.encode(text, add_special_tokens=False) for text in texts]
    turns = [
        Turn("T1T2", question=ids[0], text=ids[1], system=tokenizer().encode(system)),
        Turn("T1T2", question=ids[2], text=ids[1], system=None),
    ]
    if system and name == "mistral":
        with pytest.raises(UserError, match="has no system message"):
            prompt(layout, turns[0])
        return
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts, strict=True)]
    messages = [{"role": "system", "content": system}] * bool(system) + messages
    ours = join([prompt(layout, turns[0]), answer(layout, turns[0]), prompt(layout, turns[1])])
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert ours.tokens[-1].tolist() == list(wanted if isinstance(wanted, list) else wanted["input_ids"])
    assert bool((ours.tokens[:-1] == layout.ids("pad")[:-1, None]).all())
    trained = example(layout, turns).targets[-1]
    assert trained[trained >= 0].tolist() == 2 * [*ids[1], layout.text.special("end")]


def test_speech_is_asked_in_the_question_s_place() -> None:
    layout, theirs = layout_of(TEMPLATES["default system"])
    heard = prompt(layout, Turn("A1A2", features=5))
    read = prompt(layout, Turn("T1A2", question=theirs.encode("12345")))
    place = heard.feature_index >= 0
    assert torch.equal(heard.tokens[:, ~place], read.tokens[:, ~place]) and heard.features == (5,)
    assert bool((heard.tokens[:, place] == layout.ids("pad")[:, None]).all())
    assert heard.tokens[0, -1] == layout.streams[0].special("answer")
    spelled = prompt(layout, Turn("A1T1", features=5))
    assert layout.text.special("asr") in spelled.tokens[-1].tolist() and len(spelled) == len(heard) + 1


@pytest.mark.parametrize(
    "template", [None, "{{ messages[0].content | upper }}" + ASK, "{{ messages | length }}", "{{ raise_exception('') }}"]
)
def test_a_template_that_columns_cannot_follow_is_left_out(template: str | None) -> None:
    assert read_chat({"chat_template": template}, tokenizer()) is None
