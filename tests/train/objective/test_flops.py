"""FLOPs of a step: those of its rows, whatever lies beside an example."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from omni.model.speech_model import SpeechModel
from tests.train.objective.test_alignment_loss import HEARING
from tests.train.objective.test_objective import MODELS, make_examples, pack
from train.objective.objective import Objective, ObjectiveConfig, targets
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


def test_flops_of_features_read_as_tokens_are_those_that_torch_counts() -> None:
    """While the decoder rests, of kept frames; torch's count has the batch's own labels and the blank, too."""
    model = SpeechModel(HEARING)
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2", "A1T2", "A1T1"])], 128)
    batch.transcripts, batch.encoded = [[1, 2], [28, 3], [], [5, 3]], True
    batch.inputs = torch.randn(4, HEARING.encoder.width, max(batch.frames), requires_grad=True)
    config = ObjectiveConfig(ctc_weight=1.0, align_first=0.5)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        Objective(model, config)(batch, targets(batch), 0.0).total.backward()
    count = StepFlops(model, config)
    assert count(batch, targets(batch), 0.0) == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert count(batch, targets(batch), 0.5) == StepFlops(model)(batch, targets(batch))


@pytest.mark.parametrize("mode", ["variable", "padded"])
def test_flops_of_an_encoder_are_those_that_torch_counts(mode: str) -> None:
    """Of whole windows, where it hears those; torch's count has the alignment head, too."""
    known = MODELS["codec2"].encoder
    model = SpeechModel(replace(MODELS["codec2"], encoder=replace(known, mode=mode, width=64)))
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2"])], 64)
    if mode == "padded":
        batch.input_lengths = [2 * known.positions] * 2
        batch.inputs = F.pad(batch.inputs, (0, batch.input_lengths[0] - batch.inputs.shape[2]))
    config = ObjectiveConfig(ctc_weight=1.0, align_first=0.5)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        Objective(model, config)(batch, targets(batch), 0.0).total.backward()
    assert StepFlops(model, config)(batch, targets(batch), 0.0) == pytest.approx(counter.get_total_flops(), rel=0.06)
