"""Text assist: a row that speaks takes its text from a row that only writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni.generate.results import TextDelta
from omni.generate.runner import Runner
from omni.layout import Cursor, Layout
from omni.model.speech_model import SpeechModel
from omni.tasks import Turn, prompt
from tests.generate.conftest import features_of, last_logits, make_lm, tone
from tests.generate.session_toys import inside

CLIP = tone(0.4)
STEPS = 25


def slow(model: SpeechModel, speaks: Turn, writes: Turn) -> tuple[torch.Tensor, list[int]]:
    """Two rows by plain forwards over everything so far: the speaking row's columns [K, C], and the text."""
    layout, a = model.layout, model.layout.n_audio
    features = features_of(model, [CLIP])[0] if speaks.features else None
    prompts = [prompt(layout, speaks), prompt(layout, writes)]
    rows = [p.tokens for p in prompts]
    cursors = [Cursor.start(layout, [True], [True]), Cursor.start(layout, [True], [False])]
    allowed, text, done = layout.allowed(), [], False
    while not done and rows[0].shape[1] - len(prompts[0]) < STEPS:
        ids = []
        for p, tokens in zip(prompts, rows, strict=True):
            none = torch.full((tokens.shape[1] - len(p),), -1)
            logits = last_logits(model, tokens, features, torch.cat([p.feature_index, none]))
            ids.append([int(x.masked_fill(~allowed[k, : len(x)], float("-inf")).argmax()) for k, x in enumerate(logits)])
        ids[0][a] = ids[1][a]
        for i in range(2):
            cursors[i], push = cursors[i].push(torch.tensor([ids[i]]))
            rows[i] = torch.cat([rows[i], push.column.T], dim=1)
            if i == 0:
                done = bool(push.done)
                text += [int(push.text)] if push.has_text else []
    return rows[0][:, len(prompts[0]) :], text


def let_the_text_end(model: SpeechModel, seed: int) -> None:
    with torch.no_grad():
        end = torch.randn(32, generator=torch.Generator().manual_seed(seed))
        model.decoder.head_weight(model.layout.n_audio)[model.layout.text.special("end")] = 0.6 * end


@pytest.mark.sampled(1)
@pytest.mark.parametrize("task", ["A1A2", "T1A2"])
@pytest.mark.parametrize("shape", [{}, {"post_layers": 1}, {"window": 8}], ids=["full", "post", "window"])
def test_assisted_answers_equal_the_slow_way(
    layout: Layout, shape: dict[str, Any], task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = make_lm(layout, **shape)
    batches: list[int] = []
    init = Runner.__init__

    def watched(self: Runner, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        model = self._decode
        self._decode = lambda column, **kw: batches.append(len(column)) or model(column, **kw)

    monkeypatch.setattr(Runner, "__init__", watched)
    question: Any = CLIP if task == "A1A2" else "speak"
    asked = {"features": lm.config.features(len(CLIP))} if task == "A1A2" else {"question": lm.tokenizer.encode("speak")}
    turns = Turn(task, **asked), Turn(task.replace("A2", "T2"), **asked)  # type: ignore[arg-type]
    for seed in range(30):  # the first model whose text ends after a while, and well before the sound
        let_the_text_end(lm.model, seed)
        columns, text = slow(lm.model, *turns)
        if 1 < len(text) < columns.shape[1] - 5:
            break
    else:
        pytest.fail("no model's text ends in time")

    with lm.session(text_assist=True, max_seconds=1.0) as session:
        events = list(session.ask(question, task))
        assert inside(session)._last is not None
        mine = torch.tensor(inside(session)._last.reply.columns).T[:, :STEPS]
        assert torch.equal(mine, columns[:, : mine.shape[1]])
        assert list(session.turns[0].text or ()) == text
        assert "".join(e.text for e in events if isinstance(e, TextDelta)) == lm.tokenizer.decode(text)
        # A column is fed for each but the last; the text row goes with the column that ends the text.
        assert batches == [2] * len(text) + [1] * (len(inside(session)._last.reply.columns) - 1 - len(text))

    alone = lm.generate(question, task, max_seconds=1.0)
    assert list(alone.tokens) != text  # the assist matters


def test_tasks_that_do_not_write_and_speak_go_without(layout: Layout) -> None:
    lm = make_lm(layout)
    for task in ("T1T2", "T1A1"):
        plain = lm.generate("hello", task, max_seconds=0.4, max_tokens=8)
        assisted = lm.generate("hello", task, max_seconds=0.4, max_tokens=8, text_assist=True)
        assert plain.tokens == assisted.tokens
        assert plain.codes is assisted.codes or torch.equal(plain.codes, assisted.codes)  # type: ignore[arg-type]
