"""FLOPs of a step: those of its rows, whatever lies beside an example."""

from __future__ import annotations

import pytest
import torch

from omni.model.speech_model import SpeechModel
from tests.train.objective.test_objective import MODELS, make_examples, pack
from train.objective.objective import targets
from train.trainer.metrics import StepFlops


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_a_batch_are_those_of_its_rows(name: str) -> None:
    """Also where an example fills its row: it does not see the next one."""
    with torch.device("meta"):
        model = SpeechModel(MODELS[name])
    rows = [[made] for made in make_examples(model, ["A1A2", "A1T1"])]
    width = max(len(columns) for ((columns, *_),) in rows)
    full = [[max(rows, key=lambda row: len(row[0][0]))[0]]] * 2
    count = StepFlops(model)
    for given in (rows, full):
        whole, parts = pack(model, given, width), [pack(model, [row], width) for row in given]
        assert count(whole, targets(whole)) == pytest.approx(sum(count(part, targets(part)) for part in parts))
    longer = pack(model, full[:1], width + 9)  # an unused end is no work
    assert count(longer, targets(longer)) == pytest.approx(count(parts[0], targets(parts[0])))
