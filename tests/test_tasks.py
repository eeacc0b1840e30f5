"""Law 3: a training example's prompt equals the serving prompt, for every task."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omni.layout import IGNORE, Layout
from omni.tasks import TASKS, Turn, answer, example, prompt, system_message

LAYOUTS = ["codec2", "mini-omni"]


def make_turn(layout: Layout, task: str, seed: int = 0) -> Turn:
    g = torch.Generator().manual_seed(seed)
    codes = torch.stack([torch.randint(s.size, (3,), generator=g) for s in layout.audio])
    return Turn(task, features=4, question=[5, 6, 7], text=[8, 9], codes=codes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", TASKS)
def test_conversation_prompt_is_history_then_prompt(layout, first):
    """What a session holds before the second answer is what training puts before it."""
    layout = Layout.preset(layout)
    one, two = make_turn(layout, first), make_turn(layout, "A1A2", seed=1)
    whole = example(layout, [one, two])
    history = torch.cat([prompt(layout, one).tokens, answer(layout, one).tokens, prompt(layout, two).tokens], dim=1)
    assert torch.equal(whole.tokens[:, : history.shape[1]], history)
    speech = sum(t.question == "audio" for t in (TASKS[first], TASKS["A1A2"]))
    assert whole.features == (4,) * speech
    assert whole.feature_index[whole.feature_index >= 0].tolist() == list(range(4 * speech))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("task", TASKS)
def test_targets_are_the_next_column_and_only_on_trained_streams(layout, task):
    layout = Layout.preset(layout)
    turn = make_turn(layout, task)
    whole, n = example(layout, [turn]), len(prompt(layout, turn))
    has = whole.targets != IGNORE
    assert torch.equal(whole.targets[:, :-1][has[:, :-1]], whole.tokens[:, 1:][has[:, :-1]])
    assert not has[:, : n - 1].any()  # nothing of the question is trained
    assert tuple(has.any(1).tolist()) == TASKS[task].trained(layout)
    if TASKS[task].text:
        assert whole.targets[-1][has[-1]].tolist() == [8, 9, layout.text.special("end")]


def test_a_cut_answer_column_by_column():
    """The drawing in `omni/layout.py`: what was heard is a whole answer, its ends are not trained, the turn after it is."""
    layout = Layout.preset("codec2")
    codes = torch.tensor([[1], [2], [3], [4]])
    cut, after = Turn("T1A2", question=[5], text=[8], codes=codes, cut=True), make_turn(layout, "A1A2")
    whole = example(layout, [cut, after])
    begin, end = len(prompt(layout, cut)), len(example(layout, [cut]))
    drawn = layout.draw(whole.tokens[:, begin:end], (whole.targets != IGNORE)[:, begin - 1 : end - 1], width=4)
    assert drawn.splitlines()[1:] == [
        "audio0     .    1* end    .    .    .",
        "audio1     .    .    2* end    .    .",
        "audio2     .    .    .    3* end    .",
        "audio3     .    .    .    .    4* end",
        "text       8* end    .    .    .    .",
    ]
    assert torch.equal(whole.targets[:, end:], example(layout, [after]).targets)


def test_mini_omni_prompts_column_by_column():
    """The prompts of facts.md, written out by hand."""
    layout = Layout.preset("mini-omni")
    turn = Turn("A1A2", features=2)
    audio, text = prompt(layout, turn).tokens[0].tolist(), prompt(layout, turn).tokens[7].tolist()
    assert audio == [4098, 4097, 4097, 4096, 4099]
    assert text == [151938, 151937, 151937, 151936, 151939]
    asr = prompt(layout, Turn("A1T1", features=2)).tokens
    assert asr[7].tolist() == [151938, 151937, 151937, 151936, 151940]
    assert asr[0].tolist() == [4098, 4097, 4097, 4096, 4097]  # text-only answer: pad in the last column
    written = prompt(layout, Turn("T1A2", question=[1, 2])).tokens
    assert written[7].tolist() == [151938, 1, 2, 151936, 151939]
    assert written[3].tolist() == [4097, 4097, 4097, 4097, 4099]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("task", TASKS)
def test_a_system_message_comes_first_and_nothing_of_it_is_trained(layout, task):
    """Law 3 with a system message: what comes before the answer is the message, then the prompt that there is without one."""
    layout = Layout.preset(layout)
    turn = make_turn(layout, task)
    told, plain = replace(turn, system=(1, 2, 3)), prompt(layout, turn)
    message, asked, whole = system_message(layout, (1, 2, 3)), prompt(layout, told), example(layout, [told, turn])
    text, audio = message.tokens[-1].tolist(), message.tokens[:-1]
    assert text == [layout.text.special("input"), 1, 2, 3, layout.text.special("end")]
    assert torch.equal(audio, layout.ids("pad")[:-1, None].expand(-1, 5))
    assert torch.equal(asked.tokens, torch.cat([message.tokens, plain.tokens], dim=1))
    assert torch.equal(asked.feature_index, torch.cat([torch.full((5,), -1), plain.feature_index]))
    rest = example(layout, [turn, turn])
    assert torch.equal(whole.tokens, torch.cat([message.tokens, rest.tokens], dim=1))
    assert torch.equal(whole.targets[:, 5:], rest.targets) and bool((whole.targets[:, :5] == IGNORE).all())
    assert whole.features == rest.features and len(system_message(layout, ())) == 0
