"""Laws of planning: what it says of memory is what a step takes, and its advice holds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni.config import ModelConfig, ProjectorConfig, preset
from omni.model.quantize import numels, quantize
from omni.model.speech_model import SpeechModel
from train.config.run import FitConfig
from train.config.sections import (
    BudgetConfig,
    CheckpointConfig,
    FabricConfig,
    LoRASection,
    ModelSection,
    OptimizerConfig,
    ValidationConfig,
)
from train.data.config import DataConfig, PackingConfig, SourceConfig, tasks_of
from train.objective.objective import Objective, targets
from train.plan.estimate import Estimate, estimate, phases_of, sharded
from train.plan.knobs import savings, try_knobs
from train.plan.parameters import count_parameters, meta_model
from train.plan.quantized import dense_bytes, packed_bytes
from train.plan.step import build_workbench
from train.plan.trace import trace
from train.plan.trial import attempt
from train.plan.worst_batch import worst_batch

pytestmark = pytest.mark.usefixtures("forked")
MIB = float(1 << 20)


def shape(width: int = 64, layers: int = 2, encoder_layers: int = 1, **decoder: Any) -> ModelConfig:
    nano = preset("nano")
    return replace(
        nano,
        encoder=replace(nano.encoder, width=64, heads=2, layers=encoder_layers),
        projector=ProjectorConfig("mlp", hidden=64, stack=2),
        decoder=replace(nano.decoder, width=width, layers=layers, heads=4, kv_heads=2, mlp_width=3 * width, **decoder),
    )


def run(rows: int = 2, length: int = 64, micro: int = 1, optimizer: str = "adamw", **fabric: Any) -> FitConfig:
    return FitConfig(
        budget=BudgetConfig(steps=100),
        model=ModelSection(preset="nano"),
        data=DataConfig((SourceConfig("spoken-digits"),), micro_batches=micro, packing=PackingConfig(rows=rows, length=length)),
        optimizer=OptimizerConfig(name=optimizer),  # type: ignore[arg-type]
        fabric=FabricConfig(**{"accelerator": "cpu", "devices": 1, **fabric}),
        validation=ValidationConfig(questions=0),
    )


# --- against a step that is really taken -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "config"),
    [
        (preset("nano"), run(rows=4, length=128)),
        pytest.param(
            shape(width=384, layers=3),
            run(rows=2, length=128, checkpointing=True, micro=2, optimizer="muon"),
            marks=pytest.mark.long,
        ),
        (preset("nano"), run(rows=4, length=256, checkpointing="selective")),
    ],
    ids=["nano", "checkpointing-muon", "selective"],
)
def test_estimate_is_what_a_step_takes(model: ModelConfig, config: FitConfig) -> None:
    wanted = attempt(config, model, config.data.micro_batches, "cpu")
    found = estimate(config, model).total
    assert wanted.peak > 60 * MIB  # enough to be seen beside what a process holds anyway
    assert found == pytest.approx(wanted.peak, rel=0.15), (found / MIB, wanted.peak / MIB)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "width", "layers", "rows", "checkpointing"),
    [
        ("nf4", 512, 3, 2, False),
        pytest.param("int8", 384, 3, 4, True, marks=pytest.mark.long),
        pytest.param("nf4", 384, 4, 4, True, marks=pytest.mark.long),
        pytest.param("int8", 512, 5, 2, False, marks=pytest.mark.long),
    ],
)
def test_a_quantised_base_takes_what_is_said(kind: Any, width: int, layers: int, rows: int, checkpointing: bool) -> None:
    model = shape(width=width, layers=layers)
    config = replace(run(rows=rows, length=128, checkpointing=checkpointing), lora=LoRASection(rank=4, quantize=kind))
    wanted, found = attempt(config, model, 1, "cpu").peak, estimate(config, model).total
    assert found == pytest.approx(wanted, rel=0.15), (found / MIB, wanted / MIB)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "more"), [("nf4", 0.5 + 1 / 64), ("int8", 1.0)])
def test_quantised_weights_are_counted_to_the_byte(kind: Any, more: float) -> None:
    """What bitsandbytes really holds, every storage once."""
    config, model = replace(run(), lora=LoRASection(rank=4, quantize=kind)), shape(width=192)
    paper, real = meta_model(config, model), SpeechModel(model)
    names = quantize(real, kind, ("decoder.blocks.*",))
    held: dict[int, int] = {}
    for linear in map(real.get_submodule, names):
        for tensor in _tensors(linear.weight):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert packed_bytes(paper) == sum(held.values())
    assert packed_bytes(paper) == pytest.approx(more * sum(numels(real)[f"{n}.weight"] for n in names), rel=0.04)  # and tables
    full = count_parameters(meta_model(replace(config, lora=None), model))
    assert [c.total for c in count_parameters(paper) if c.part != "LoRA"] == [c.total for c in full]
    plain = phases_of(replace(config, lora=LoRASection(rank=4)), model, 1, cuda=False)["optimizer"]["weights"]
    few = phases_of(config, model, 1, cuda=False)["optimizer"]["weights"]
    assert plain - few == 4 * sum(numels(real)[f"{n}.weight"] for n in names) - sum(held.values())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_an_optimizer_in_eight_bits_is_counted_to_the_byte() -> None:
    config, model = run(optimizer="paged_adamw_8bit"), shape(width=192)
    bench = build_workbench(config, model)
    for p in bench.learning:
        p.grad = torch.zeros_like(p)
    bench.optimizer.step()
    tables = ("qmap1", "qmap2", "step")  # one of 256 numbers each for all parameters, and a count
    held = sum(
        value.untyped_storage().nbytes()
        for state in bench.optimizer.state.values()
        for name, value in state.items()
        if name not in tables
    )
    assert phases_of(config, model, 1, cuda=False)["forward"]["optimizer"] == held
    assert held < 3 * sum(p.numel() for p in bench.learning)


def _tensors(weight: Any) -> list[torch.Tensor]:
    state = getattr(weight, "quant_state", None)
    parts = vars(weight) if state is None else {**vars(state), **{f"2.{k}": v for k, v in vars(state.state2).items()}}
    return [weight.data, *(v for v in parts.values() if isinstance(v, torch.Tensor))]


def test_quantised_weights_are_whole_in_every_process() -> None:
    config, model = replace(run(micro=4, devices=4, strategy="fsdp"), lora=LoRASection(rank=4, quantize="nf4")), shape()
    packed, one = packed_bytes(meta_model(config, model)), phases_of(config, model, 1, cuda=False)["optimizer"]
    spread = sharded("optimizer", one, meta_model(config, model), 4, (4, 4, False))
    assert spread["weights"] == pytest.approx(packed + (one["weights"] - packed) / 4)
    phase = estimate(config, model)
    assert phase.total >= dense_bytes(meta_model(config, model))  # a CPU's process reads the base whole


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(("layers", "encoder_layers", "checkpointing"), [(6, 1, True), (4, 4, False)])
def test_deep_stacks_are_continued_as_if_traced(layers: int, encoder_layers: int, checkpointing: bool) -> None:
    config, deep = run(checkpointing=checkpointing), shape(layers=layers, encoder_layers=encoder_layers)
    whole = trace(config, deep, worst_batch(config.data, deep), 1)
    continued = phases_of(config, deep, 1, cuda=False)
    fullest = max(sum(parts.values()) for parts in whole.values())
    assert max(sum(parts.values()) for parts in continued.values()) == pytest.approx(fullest, rel=0.02)


@pytest.mark.parametrize(("rule", "states"), [("adamw", 2), ("muon", 1)])
def test_weights_and_state_are_counted_by_hand(rule: str, states: int) -> None:
    config, model = run(optimizer=rule), shape()
    config = replace(config, ema=0.99, trainable=("decoder.blocks.*",))
    parts = phases_of(config, model, 1, cuda=False)["optimizer"]
    paper = meta_model(config, model)
    learning = {n: p.numel() for n, p in paper.named_parameters() if p.requires_grad}
    matrices = sum(n for name, n in learning.items() if "norm" not in name)
    norms = sum(learning.values()) - matrices
    assert parts["gradients"] == pytest.approx(4 * (matrices + norms))
    assert parts["average"] == pytest.approx(4 * (matrices + norms))
    assert parts["optimizer"] == pytest.approx(4 * (states * matrices + 2 * norms), rel=0.01)
    buffers = sum(b.numel() * b.element_size() for b in paper.buffers())
    assert parts["weights"] == pytest.approx(4 * sum(p.numel() for p in paper.parameters()) + buffers, rel=0.001)


def test_tracing_leaves_nothing_behind() -> None:
    config, model = run(), shape()
    estimate(config, model)
    objective, batch = Objective(SpeechModel(model)), worst_batch(config.data, model)
    total = objective(batch, targets(batch)).total
    total.backward()
    assert type(total) is torch.Tensor and bool(total.isfinite())


# --- the worst batch ---------------------------------------------------------------------------------------------------


def test_worst_batch_is_spelt_in_every_way() -> None:
    model = replace(shape(), ctc=20, ctc_sounds=9)
    batch = worst_batch(replace(run().data, alignment="words"), model)
    for ids, frames in zip(batch.transcripts, batch.frames, strict=True):
        assert sum(0 < i < 20 for i in ids) == sum(20 < i < 29 for i in ids) == len(ids) / 2 == max(1, frames // 4)


@pytest.mark.parametrize(
    ("tasks", "heard", "spoken"), [({"A1A2": 1.0}, True, True), ({"T1T2": 1.0, "A1T1": 0.0}, False, False)]
)
def test_worst_batch_is_full(tasks: dict[str, float], heard: bool, spoken: bool) -> None:
    data = replace(run(rows=3, length=100).data, sources=(SourceConfig("spoken-digits", tasks=tasks),))
    batch, model = worst_batch(data, shape()), shape()
    assert batch.padding == 0 and len(tasks_of(data)) == 1
    assert (batch.feature_index >= 0).sum() == sum(-(-n // model.projector.stack) for n in batch.frames)
    assert bool(batch.frames) == heard
    predicted = [s.role == "predicted" for s in model.layout.audio]
    expected = [300 if p and spoken else 0 for p in predicted] + [300]
    assert [len(at) for at in batch.supervised] == expected


@pytest.mark.parametrize("length", [8, 40, 3000])
def test_worst_batch_of_padded_windows_runs(length: int) -> None:
    nano = shape()
    padded = replace(nano, encoder=replace(nano.encoder, mode="padded", hop=160, window_seconds=2.0))
    batch = worst_batch(run(rows=1, length=length).data, padded)
    assert set(batch.input_lengths) == {2 * padded.encoder.positions}
    assert int(batch.feature_index.max()) + 1 == sum(-(-n // 2) for n in batch.frames)


# --- parameters and devices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [shape(), shape(tie_text=True, post_layers=2), replace(preset("nano"), ctc=20)])
def test_parameters_are_the_models(model: ModelConfig) -> None:
    config = replace(run(), trainable=("projector.*", "decoder.audio_head.*"))
    counts = {c.part: c for c in count_parameters(meta_model(config, model))}
    real = SpeechModel(model)
    assert sum(c.total for c in counts.values()) == sum(p.numel() for p in real.parameters())
    assert counts["encoder"].total == sum(p.numel() for p in real.encoder.parameters())
    blocks = [*real.decoder.blocks.parameters(), *real.decoder.post_blocks.parameters()]
    assert counts["decoder blocks"].total == sum(p.numel() for p in blocks)
    assert counts["projector"].trainable == counts["projector"].total and counts["encoder"].trainable == 0
    assert counts["heads"].trainable == real.decoder.audio_head.weight.numel()


@pytest.mark.long
def test_what_learns_beside_a_base_in_bf16_is_counted_in_full() -> None:
    """As `train.distributed.precision.AdapterPrecision` has it; the optimizer's state and the gradients follow."""
    model, lora = shape(tie_text=True), LoRASection(rank=4, trainable=("projector.*", "decoder.text_embedding.*"))
    config = replace(run(precision="bf16-true"), lora=lora)
    paper, parts = meta_model(config, model), phases_of(config, model, 1, cuda=False)["optimizer"]
    learning = sum(p.numel() for p in paper.parameters() if p.requires_grad)
    still = sum(t.numel() for t in paper.parameters() if not t.requires_grad)
    buffers = sum(t.numel() * (2 if t.is_floating_point() else t.element_size()) for t in paper.buffers())
    assert parts["weights"] == pytest.approx(2 * still + 4 * learning + buffers, rel=0.001)
    assert parts["gradients"] == pytest.approx(4 * learning)
    assert parts["optimizer"] == pytest.approx(8 * learning, rel=0.01)
    two = replace(config, fabric=replace(config.fabric, devices=2), data=replace(config.data, micro_batches=2))
    ddp, fsdp = (estimate(replace(two, fabric=replace(two.fabric, strategy=name)), model) for name in ("ddp", "fsdp"))
    assert ddp.parts["communication"] == 4 * learning
    assert fsdp.parts["weights"] == pytest.approx(parts["weights"] / 2, rel=0.001)
    root, block = (
        sum(p.numel() * (4 if p.requires_grad else 2) for n, p in paper.named_parameters() if ("blocks." in n) == inside)
        for inside in (False, True)
    )
    assert root < fsdp.parts["communication"] < root + block + 4 * learning + 1


@pytest.mark.long
def test_fsdp_divides_what_is_kept_and_ddp_does_not() -> None:
    model = shape()

    def spread(devices: int, strategy: str) -> Estimate:
        return estimate(run(micro=8, devices=devices, strategy=strategy), model)

    one, ddp, two, four = spread(1, "auto"), spread(2, "auto"), spread(2, "fsdp"), spread(4, "fsdp")
    learning = 4.0 * sum(p.numel() for p in SpeechModel(model).parameters())
    assert ddp.total == pytest.approx(one.total + learning)
    for part in ("weights", "optimizer"):
        assert two.parts[part] == pytest.approx(2 * four.parts[part])
        assert two.parts[part] == pytest.approx(one.parts[part] / 2)
    assert two.parts["activations"] == pytest.approx(four.parts["activations"])
    assert four.total < two.total


@pytest.mark.long
def test_half_precision_halves_the_weights() -> None:
    model = shape()
    full, half = (estimate(run(precision=p), model, cuda=True) for p in ("32-true", "bf16-true"))
    assert half.parts["optimizer"] == pytest.approx(full.parts["optimizer"] / 2, rel=0.01)
    assert half.total < 0.7 * full.total


@pytest.mark.parametrize("cuda", [pytest.param(False, marks=pytest.mark.long), True])
def test_selective_checkpointing_keeps_more_than_all_and_less_than_none(cuda: bool) -> None:
    """What a forward pass leaves for the backward one."""
    kept = [
        phases_of(run(rows=4, length=128, checkpointing=how), shape(width=96, layers=1), 1, cuda)["objective"]["activations"]
        for how in (False, "selective", True)
    ]
    assert kept[0] > 1.25 * kept[1] > 1.25 * 1.25 * kept[2], [size / MIB for size in kept]


# --- knobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_knobs_save_and_the_first_that_is_enough_is_enough() -> None:
    config, model = run(rows=4, length=128), shape(layers=2)
    whole = estimate(config, model).total
    alone, row = try_knobs(config, model, 0.8 * whole, cuda=False)
    assert any(one.fits for one in alone) and row == []
    for one in alone:
        assert one.total + one.saved == pytest.approx(whole) and one.saved > 0
        assert one.fits == (one.total <= 0.8 * whole)
        assert estimate(one.knob.config, model).total == pytest.approx(one.total)
    assert alone[0].knob.config.data.packing.rows * alone[0].knob.config.data.micro_batches == 4


def test_knobs_recompute_selectively_before_all(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = (SimpleNamespace(total=2.0**-i) for i in itertools.count())  # each knob saves
    monkeypatch.setattr("train.plan.knobs.estimate", lambda *given: next(totals))

    def offered(checkpointing: Any) -> list[str]:
        alone, _ = try_knobs(run(checkpointing=checkpointing), shape(), 0.0, cuda=True)
        return [one.knob.keys for one in alone if "checkpointing" in one.knob.keys]

    assert offered(False) == ["--fabric.checkpointing selective", "--fabric.checkpointing true"]
    assert offered("selective") == ["--fabric.checkpointing true"] and offered(True) == []


@pytest.mark.long
def test_answers_are_asked_fewer_at_a_time_where_they_take_most() -> None:
    config, model = replace(run(rows=1), validation=ValidationConfig(questions=64)), shape()
    whole = estimate(config, model)
    assert whole.phase == "validation's answers" and whole.total > 1.5 * whole.step
    alone, _ = try_knobs(config, model, 0.9 * whole.total, cuda=False)
    assert alone[0].knob.keys == "--validation.rows 8" and alone[0].fits


def test_what_saves_memory_of_a_step_is_told_from_what_saves_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most first; fsdp on as many devices as there are, and on none where there is one."""

    def estimated(config: FitConfig, model: ModelConfig, cuda: bool) -> Any:
        step = (
            100.0 / config.data.micro_batches
            - 30 * (config.fabric.checkpointing is True)
            - 45 * (config.fabric.strategy == "fsdp")
        )
        answers = 2.0 * config.validation.rows if config.validation.questions else 0.0
        return SimpleNamespace(step=step, total=max(step, 2 * answers))

    monkeypatch.setattr("train.plan.knobs.estimate", estimated)
    config, model = replace(run(rows=2), validation=ValidationConfig(questions=64, rows=64)), shape()
    found = savings(config, model, 1, cuda=False, in_step=True)
    rows = "--data.packing.rows 1 --data.micro_batches 2"
    assert [(one.knob.keys, one.saved) for one in found] == [(rows, 50.0), ("--fabric.checkpointing true", 30.0)]
    assert [one.knob.keys for one in savings(config, model, 1, False, in_step=False)] == ["--validation.rows 16"]
    shared = [one.knob.keys for one in savings(config, model, 4, True, in_step=True)]
    assert shared[0] == "--devices 4 --fabric.strategy fsdp --data.micro_batches 4"


@pytest.mark.long
def test_knobs_are_turned_together_where_none_is_enough() -> None:
    config, model = run(rows=4, length=128), shape(layers=2)
    lowest = min(one.total for one in try_knobs(config, model, 0.0, cuda=False)[0])
    alone, row = try_knobs(config, model, 0.8 * lowest, cuda=False)
    assert not any(one.fits for one in alone) and len(row) > 1
    assert [one.fits for one in row] == [False] * (len(row) - 1) + [True]
    assert [one.total for one in row] == sorted((one.total for one in row), reverse=True)


@pytest.mark.long
def test_a_checkpoint_beside_the_steps_is_a_copy_of_the_state_that_the_peak_does_not_count() -> None:
    """Weights and both moments; none where every save is the last one, or is written between steps. Shards are copied twice."""
    config, model = run(), shape()
    found, least = estimate(config, model), 3 * 4 * sum(p.numel() for p in SpeechModel(model).parameters())
    held = found.phases["checkpoint"]["snapshot"]
    assert least <= held < 1.1 * least and found.totals["checkpoint"] == 2 * held
    between = replace(config, checkpoint=CheckpointConfig(asynchronous=False))
    once = replace(config, checkpoint=CheckpointConfig(every_steps=100, every_minutes=None))
    for other in (
        between,
        once,
        replace(config, budget=BudgetConfig(steps=1)),
        replace(config, budget=BudgetConfig(minutes=9)),
    ):
        assert estimate(other, model).phases["checkpoint"]["snapshot"] == 0
        assert estimate(other, model).total == found.total
    best = replace(config, budget=BudgetConfig(steps=9), validation=ValidationConfig(every_steps=3))
    assert estimate(best, model).phases["checkpoint"]["snapshot"] == held
    two = estimate(run(micro=2, strategy="fsdp", devices=2), model).phases["checkpoint"]
    assert two["snapshot"] == two["copies"] == held / 2
    host = estimate(run(), model, cuda=True).host["checkpoint"], estimate(between, model, cuda=True).host["checkpoint"]
    assert host[0] - host[1] == held
