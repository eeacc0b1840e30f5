"""Shared projectors in a run: every kind trains, balanced or not, and each feature goes through its own task's parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni.model.multitask_projector import SHARING
from omni.model.speech_model import SpeechModel
from tests.train.balance.toys import balanced_config, balanced_fit, balanced_parts, tiny, tiny_pipeline
from train.balance.config import BalanceConfig
from train.config.sections import BudgetConfig
from train.data.batching.loader import StepLoader
from train.objective.objective import Objective, feature_tasks, targets


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", list(SHARING))
def test_every_kind_learns_in_a_run(tmp_path: Path, kind: str) -> None:
    config = balanced_config(tmp_path, BalanceConfig("mgda", "features"), budget=BudgetConfig(steps=1))
    parts = balanced_parts(config, tiny(kind=kind))
    before = {name: t.clone() for name, t in parts.objective.state_dict().items() if "projector" in name}
    weights = balanced_fit(config, parts)
    assert before and all(not weights[f"model.{name}"].equal(t) for name, t in before.items())


def test_features_of_a_packed_batch_have_the_tasks_of_their_examples() -> None:
    """The loss by a shared projector is that of clips adapted one by one, by the names of their examples' tasks."""
    torch.manual_seed(0)
    model = SpeechModel(tiny(kind="mmoe")).eval()
    (batch,) = next(StepLoader(tiny_pipeline(model.config), 1))
    count = sum(-(-n // 2) for n in batch.frames)
    task, place = feature_tasks(batch, count), 0
    for row, column in (batch.feature_index == 0).nonzero().tolist():
        assert task[0] == batch.task[row, column]
    heard = model.encoder.run(batch.inputs, batch.input_lengths, batch.frames)
    names, pieces = ("A1T1", "A1T2", "A1A2", "T1A1", "T1A2", "T1T2"), []
    for frames in heard.split(batch.frames):
        length = -(-len(frames) // 2)
        assert len(set(task[place : place + length].tolist())) == 1
        pieces.append(model.projector(frames, [len(frames)], [names[int(task[place])]]))
        place += length
    hidden = model(batch.tokens, torch.cat(pieces), batch.feature_index, segments=batch.segments)
    logits, goals = model.decoder.text_logits(hidden).flatten(0, 1), batch.targets[:, -1].flatten()
    wanted = torch.nn.functional.cross_entropy(logits, goals, ignore_index=-100, reduction="sum")
    sums = Objective(model)(batch, targets(batch)).sums
    torch.testing.assert_close(sums[:, -1].sum(), wanted, rtol=1e-5, atol=1e-5)
