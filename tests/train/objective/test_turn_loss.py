"""The loss of the turn head: binary cross-entropy over the frames that have labels, divided by those of the whole step."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS
from tests.train.objective.test_objective import MODELS, gradients, make_examples, pack
from tests.train.toys import ALONE
from train.data.batching.batch import Batch
from train.objective.config import ObjectiveConfig
from train.objective.objective import HEADS, Objective, targets
from train.trainer.metrics import StepMetrics
from train.trainer.validation import held_out_loss

CHUNKED = replace(MODELS["codec2"], encoder=replace(MODELS["codec2"].encoder, mode="chunked"))
TURN = replace(CHUNKED, turn=True)
WEIGHT = ObjectiveConfig(turn_weight=0.5)


def labelled(model: SpeechModel, tasks: list[str]) -> Batch:
    batch = pack(model, [make_examples(model, tasks)], 128)
    batch.turn = torch.randint(-1, 2, (sum(batch.frames), 2), generator=torch.Generator().manual_seed(5)).to(torch.int8)
    return batch


@pytest.fixture
def model() -> SpeechModel:
    torch.manual_seed(0)
    return SpeechModel(TURN).eval()


def test_it_is_plain_cross_entropy_over_the_labels(model: SpeechModel) -> None:
    batch = labelled(model, ["A1T1", "A1A2"])
    twin = copy.deepcopy(model)
    losses = Objective(model, WEIGHT)(batch, targets(batch))
    losses.total.backward()
    heard = twin.encoder.run(batch.inputs, batch.input_lengths, batch.frames)
    total, count = torch.zeros(()), 0
    for logits, labels in zip(twin.turn_head(heard), batch.turn, strict=True):
        for logit, label in zip(logits, labels, strict=True):
            if label >= 0:
                total, count = total + F.binary_cross_entropy(logit.sigmoid(), label.float()), count + 1
    assert float(losses.turn_count) == count == int(targets(batch)[-1]) == batch.turn_labels
    torch.testing.assert_close(losses.turn_sum, total.detach(), rtol=1e-5, atol=1e-5)
    plain = Objective(twin)(batch, targets(batch)).total + 0.5 * total / count
    torch.testing.assert_close(losses.total, plain, rtol=1e-5, atol=1e-5)
    plain.backward()
    for name, value in gradients(twin).items():
        torch.testing.assert_close(gradients(model)[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_its_gradients_reach_the_encoder_alone(model: SpeechModel) -> None:
    batch = labelled(model, ["A1T1"])
    objective = Objective(model, ObjectiveConfig(turn_weight=1.0, ctc_weight=1e-9, align_first=0.5))
    objective(batch, targets(batch), 0.1).total.backward()
    assert model.encoder.whisper.conv1.weight.grad.abs().sum() > 1e-4 and model.turn_head.weight.grad.abs().sum() > 1e-4
    assert all(p.grad is None or not p.grad.any() for p in model.decoder.parameters())


def test_parts_of_a_step_add_up_to_the_whole(model: SpeechModel) -> None:
    """Micro-batches, of one process or of several, with the denominators of the step; one has no labels, the last no clips."""
    batches = [
        labelled(model, ["A1T1", "A1A2"]),
        labelled(model, ["A1A2"]),
        labelled(model, ["A1T1"]),
        labelled(model, ["T1T2"]),
    ]
    batches[2].turn = None
    batches[3].turn = None
    whole = torch.stack([targets(batch) for batch in batches]).sum(0)
    objective = Objective(model, WEIGHT)
    found = [objective(batch, whole) for batch in batches]
    sum(one.total for one in found).backward()
    wanted, count = torch.zeros(()), 0
    for batch in batches[:2]:
        logits = model.turn_head(model.encoder.run(batch.inputs, batch.input_lengths, batch.frames))
        there = batch.turn >= 0
        wanted = wanted + F.binary_cross_entropy_with_logits(logits[there], batch.turn[there].float(), reduction="sum")
        count += int(there.sum())
    assert int(whole[-1]) == count and float(found[2].turn_sum) == float(found[3].turn_sum) == 0
    plain = sum(Objective(model)(batch, whole).total for batch in batches)
    torch.testing.assert_close(sum(one.total for one in found), plain + 0.5 * wanted / count, rtol=1e-5, atol=1e-5)


def test_a_model_without_the_head_is_as_before(model: SpeechModel) -> None:
    torch.manual_seed(0)
    bare = SpeechModel(CHUNKED).eval()
    own = bare.state_dict()
    assert all(value.equal(own[name]) for name, value in model.state_dict().items() if name in own)
    assert model.state_dict().keys() - own.keys() == {"turn_head.weight", "turn_head.bias"}
    batch = labelled(model, ["A1T1", "A1A2"])
    one, other = Objective(model)(batch, targets(batch)), Objective(bare)(batch, targets(batch))
    assert other.turn_sum is None and one.total.equal(other.total)
    assert len(targets(batch)) == len(model.layout) + HEADS


def test_its_mean_is_in_the_log_and_on_held_out_batches(model: SpeechModel) -> None:
    batches = [labelled(model, ["A1T1", "A1A2"]), labelled(model, ["A1A2"])]
    objective, names = Objective(model, WEIGHT), (tuple(TASKS), model.layout.names)
    losses = [objective(batch, targets(batch)) for batch in batches]
    wanted = sum(float(one.turn_sum) for one in losses) / sum(batch.turn_labels for batch in batches)
    metrics = StepMetrics(*names, "cpu", ALONE)
    for one in losses:
        metrics.add(one)
    assert metrics.figures()["loss/turn"] == pytest.approx(wanted, rel=1e-5)
    found = held_out_loss(objective, objective, batches, *names, torch.device("cpu"), None, ALONE)
    assert found["loss/turn"] == pytest.approx(wanted, rel=1e-5) and found["loss/alignment"] > 0
