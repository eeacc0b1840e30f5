"""Law 11: a model that has learned one batch by heart says it back through the session, text and codes alike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.layout import IGNORE, Layout
from omni.tasks import Columns, Turn, example
from tests.generate.conftest import features_of, make_lm, tone
from tests.generate.session_toys import inside

CLIPS = [tone(0.25), tone(0.35, 700.0)]


def conversations(lm: SpeechLM) -> list[tuple[list[Turn], list[Tensor]]]:
    """Three examples: a spoken answer, a conversation of three turns, and a transcription."""
    g = torch.Generator().manual_seed(3)

    def codes(frames: int) -> Tensor:
        return torch.stack([torch.randint(n, (frames,), generator=g) for n in lm.layout.codebook_sizes])

    ids = lm.tokenizer.encode
    heard = [lm.config.features(len(clip)) for clip in CLIPS]
    return [
        ([Turn("A1A2", features=heard[0], text=ids("yes"), codes=codes(6))], [CLIPS[0]]),
        (
            [
                Turn("T1A2", question=ids("who?"), text=ids("nobody"), codes=codes(3)),
                Turn("A1A2", features=heard[1], text=ids("no"), codes=codes(5)),
                Turn("T1A1", question=ids("la"), codes=codes(4)),
            ],
            [CLIPS[1]],
        ),
        ([Turn("A1T1", features=heard[1], text=ids("a tone"))], [CLIPS[1]]),
    ]


def collate(layout: Layout, examples: Sequence[Columns]) -> tuple[Tensor, Tensor, Tensor]:
    """tokens and targets [B, K, T], feature_index [B, T] over all examples' features; shorter rows end with padding."""
    time, offset = max(len(e) for e in examples), 0
    tokens = layout.ids("pad")[:, None].repeat(len(examples), 1, time)
    targets = torch.full_like(tokens, IGNORE)
    index = torch.full((len(examples), time), -1)
    for row, e in enumerate(examples):
        tokens[row, :, : len(e)], targets[row, :, : len(e)] = e.tokens, e.targets
        index[row, : len(e)] = torch.where(e.feature_index >= 0, e.feature_index + offset, -1)
        offset += sum(e.features)
    return tokens, targets, index


def learn_by_heart(lm: SpeechLM, talks: list[tuple[list[Turn], list[Tensor]]]) -> None:
    model, layout = lm.model, lm.layout
    tokens, targets, index = collate(layout, [example(layout, turns) for turns, _ in talks])
    features = torch.cat(features_of(model, [clip for _, clips in talks for clip in clips]))
    optimizer = torch.optim.Adam(model.decoder.parameters(), lr=4e-3)
    for _ in range(400):
        logits = model.decoder.logits(model(tokens, features, index))
        losses = [F.cross_entropy(x.flatten(0, 1), targets[:, k].flatten()) for k, x in enumerate(logits)]
        optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        if max(losses) < 0.01:
            return
    pytest.fail(f"the batch was not learned: {[loss.item() for loss in losses]}")


@pytest.mark.long
def test_overfit_then_say_it_back(layout: Layout) -> None:
    lm = make_lm(layout, spread=0.1)
    talks = conversations(lm)
    learn_by_heart(lm, talks)
    for turns, clips in talks:
        rest = iter(clips)
        with lm.session(context=200) as session:
            for turn in turns:
                question = next(rest) if turn.features else lm.tokenizer.decode(turn.question)
                answer = session.ask(question, turn.task).answer()
                assert answer.ended == "end"
                assert list(answer.tokens) == list(turn.text or ())
                assert answer.text == lm.tokenizer.decode(turn.text or ())
                if turn.codes is not None:
                    assert answer.codes is not None and torch.equal(answer.codes, turn.codes)
                    assert answer.audio is not None and torch.equal(answer.audio, lm.codec.decode(turn.codes))  # type: ignore[union-attr]
            check_cache(lm, session, turns)
    batch = lm.generate([CLIPS[0], CLIPS[1]], ["A1A2", "A1T1"])
    assert [a.text for a in batch] == ["yes", "a tone"]


def check_cache(lm: SpeechLM, session: Session, turns: list[Turn]) -> None:
    """What the session's cache holds are the training example's columns: all but the last, which waits for a question."""
    columns = example(lm.layout, turns).tokens
    fed = torch.tensor(inside(session)._seat.held.keys)[:, : len(lm.layout)].T
    if lm.layout.fill == "pad":
        assert torch.equal(fed, columns[:, :-1])
    held = lm.engine.runner.cache.positions[inside(session)._seat.slot]  # type: ignore[union-attr]
    assert int((held >= 0).sum()) == columns.shape[1] - 1
