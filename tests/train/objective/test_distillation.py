"""Distillation of an encoder that hears in chunks: its loss is the formula, its teacher is what it started as."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from omni.encoder.base import Encoder
from omni.lora.attach import activate, add_adapter
from omni.lora.config import LoRAConfig
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS
from tests.close import assert_near
from tests.train.objective.test_objective import MODELS, gradients, make_examples, pack
from tests.train.toys import ALONE
from train.objective.config import ObjectiveConfig
from train.objective.objective import HEADS, Objective, Teacher, targets
from train.trainer.metrics import StepMetrics
from train.trainer.validation import held_out_loss

ENCODER = replace(MODELS["codec2"].encoder, mode="chunked", chunk_ms=80, train_chunk_ms=(40, 400))
CHUNKED = replace(MODELS["codec2"], ctc=0, encoder=ENCODER)
ALL = ObjectiveConfig(distill_weight=0.5, align_first=1.0)


@pytest.fixture
def model() -> SpeechModel:
    torch.manual_seed(0)
    return SpeechModel(CHUNKED).eval()


def moved(model: SpeechModel, seed: int = 1) -> Teacher:
    """A teacher of the model's weights, which are then changed."""
    teacher, dice = Teacher(model.encoder), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.encoder.parameters():
            p += 0.1 * torch.randn(p.shape, generator=dice)
    return teacher


def plainly(encoder: Encoder, mels: torch.Tensor, length: int, chunk: int, padded: bool = False) -> torch.Tensor:
    """Whisper's modules on one clip [M, F], one frame of silence before it and a mask of blocks: frames [T, D]."""
    whisper, config, frames = encoder.whisper, encoder.config, (length + 1) // 2
    clip = mels[:, :length]
    if padded:
        clip = F.pad(clip, (0, 2 * config.positions - length), value=config.feature_floor)
    x = F.gelu(whisper.conv2(F.gelu(F.conv1d(F.pad(clip[None], (2, 0)), whisper.conv1.weight, whisper.conv1.bias))))
    x = x.transpose(1, 2) + whisper.positional_embedding[: x.shape[2]]
    at = torch.arange(x.shape[1]) // chunk
    mask = at[None] <= at[:, None]
    for block in whisper.blocks:
        y = block.attn_ln(x)
        q, k, v = (
            part(y).unflatten(2, (config.heads, -1)).transpose(1, 2)
            for part in (block.attn.query, block.attn.key, block.attn.value)
        )
        x = x + block.attn.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.mlp_ln(x))
    return whisper.ln_post(x)[0, :frames]


@pytest.mark.parametrize("padded", [False, True])
def test_it_is_the_relative_distance_of_frames_however_clips_are_packed(model: SpeechModel, padded: bool) -> None:
    teacher = moved(model)
    teacher.padded = padded
    batch, twin = pack(model, [make_examples(model, ["A1T1", "A1A2", "A1T2"])], 128), copy.deepcopy(model)
    losses = Objective(model, ALL, teacher)(batch, targets(batch), 0.3)
    losses.total.backward()
    total = torch.zeros(())
    for mels, length in zip(batch.inputs, batch.input_lengths, strict=True):
        heard = plainly(twin.encoder, mels, length, chunk=4)
        taught = plainly(teacher.encoder, mels, length, chunk=10_000, padded=padded).detach()
        total = total + ((heard - taught).square().sum(1) / taught.square().sum(1)).sum()
    (0.5 * total / sum(batch.frames)).backward()
    assert_near(losses.distill_sum, total.detach(), 1e-5)
    assert_near(losses.total.detach(), 0.5 * total.detach() / sum(batch.frames), 1e-5)
    assert float(losses.distill_count) == sum(batch.frames) == int(targets(batch)[-HEADS])
    wanted = gradients(twin)
    assert {name for name, value in gradients(model).items() if value.any()} == {n for n, g in wanted.items() if g.any()}
    for name, value in wanted.items():
        assert_near(gradients(model)[name], value, 2e-4, what=name)
    assert all(p.grad is None for p in teacher.parameters())


def test_parts_of_a_step_add_up_to_the_whole_and_one_has_no_clips(model: SpeechModel) -> None:
    teacher = moved(model)
    batches = [pack(model, [make_examples(model, tasks)], 128) for tasks in (["A1T1", "A1A2"], ["A1T2"], ["T1T2"])]
    whole = torch.stack([targets(batch) for batch in batches]).sum(0)
    objective = Objective(model, ALL, teacher)
    found = [objective(batch, whole) for batch in batches]
    assert float(found[2].distill_sum) == float(found[2].distill_count) == 0
    mean = sum(float(one.distill_sum) for one in found) / sum(sum(batch.frames) for batch in batches)
    assert float(sum(one.total.detach() for one in found)) == pytest.approx(0.5 * mean, rel=1e-5)
    sum(one.total for one in found).backward()
    assert all(p.grad is not None for p in model.parameters())  # under DDP every parameter takes part


def test_an_encoder_that_hears_whole_clips_starts_at_its_teacher(model: SpeechModel) -> None:
    """Bit for bit, with adapters that were not trained yet, and with any that are switched off."""
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2"])], 128)
    whole = Teacher(model.encoder)(model.encoder, batch.inputs, batch.input_lengths, batch.frames)
    add_adapter(model, LoRAConfig(("encoder.*",), rank=2))
    with torch.no_grad():
        for p in (p for name, p in model.named_parameters() if name.endswith("lora.default.b")):
            p += 0.3 * torch.randn(p.shape)
    own = Teacher()(model.encoder, batch.inputs, batch.input_lengths, batch.frames)
    assert own.equal(whole) and not own.requires_grad
    model.train()
    assert Teacher()(model.encoder, batch.inputs, batch.input_lengths, batch.frames).equal(whole)  # whatever chunk is drawn
    model.eval().set_chunk(0)
    adapted = model.encoder.run(batch.inputs, batch.input_lengths, batch.frames)
    activate(model)
    assert model.encoder.run(batch.inputs, batch.input_lengths, batch.frames).equal(whole) and not adapted.equal(whole)


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_checkpointing_changes_nothing(model: SpeechModel, recompute) -> None:
    teacher, found = moved(model), []
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2"])], 128)
    for again in (False, recompute):
        model.train().zero_grad()
        model.set_checkpointing(again)
        Objective(model, ALL, teacher)(batch, targets(batch)).total.backward()
        found.append({name: value.clone() for name, value in gradients(model).items()})
    assert all(value.equal(found[1][name]) for name, value in found[0].items())


def test_it_goes_beside_the_other_losses(model: SpeechModel) -> None:
    teacher, batch = moved(model), pack(model, [make_examples(model, ["A1T1", "A1A2"])], 128)
    both = Objective(model, ObjectiveConfig(distill_weight=0.5), teacher)(batch, targets(batch))
    plain = Objective(model)(batch, targets(batch))
    assert plain.distill_sum is None
    assert_near(both.total, plain.total + 0.5 * both.distill_sum / both.distill_count, 1e-5)


def test_only_the_encoder_runs_to_the_end_where_it_is_alone(model: SpeechModel) -> None:
    objective, batch = Objective(model, ALL, moved(model)), pack(model, [make_examples(model, ["A1T1"])], 128)
    assert len(objective.idle(1.0)) == len([*model.decoder.parameters(), *model.projector.parameters()])
    losses = objective(batch, targets(batch), 1.0)
    assert not losses.counts.any() and float(losses.total.detach()) > 0


def test_its_mean_is_in_the_log_and_on_held_out_batches(model: SpeechModel) -> None:
    batches = [pack(model, [make_examples(model, tasks)], 128) for tasks in (["A1T1", "A1A2"], ["A1T2"])]
    objective, names = Objective(model, ALL, moved(model)), (tuple(TASKS), model.layout.names)
    losses = [objective(batch, targets(batch)) for batch in batches]
    wanted = sum(float(one.distill_sum) for one in losses) / sum(sum(batch.frames) for batch in batches)
    metrics = StepMetrics(*names, "cpu", ALONE)
    for one in losses:
        metrics.add(one)
    kept = metrics.state()
    assert metrics.figures()["loss/distill"] == pytest.approx(wanted, rel=1e-5)
    found = held_out_loss(objective, objective, batches, *names, torch.device("cpu"), None, ALONE)
    assert found == {"loss/distill": pytest.approx(wanted, rel=1e-5)}
    metrics.restore([sums[:-2] for sums in kept])  # of a checkpoint from before distillation
    assert "loss/distill" not in metrics.figures()
