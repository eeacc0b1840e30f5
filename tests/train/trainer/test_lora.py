"""LoRA in a run: what is trained, what is stored, how it goes on, what comes out; and its laws in bf16: what is trained is held
in fp32, so that small steps count, and 4 bits are multiplied in bf16."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from omni.checkpoint.folder import load_folder, save_folder
from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.layout import Layout
from omni.lora.peft import load_adapter, merged_state
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.close import assert_near
from tests.train.distributed.test_fabric import losses
from tests.train.distributed.test_precision import real_parts
from tests.train.distributed.test_quantized import SMALL_STEPS
from tests.train.toys import (
    ToyModel,
    adapted_parts,
    assert_adapters_learn,
    final_tensors,
    toy_config,
    toy_fit,
    toy_lora,
    toy_parts,
)
from train.commands.dry_run import describe_run
from train.config.run import FitConfig
from train.config.sections import (
    BudgetConfig,
    CheckpointConfig,
    FabricConfig,
    LoRASection,
    ModelSection,
    OptimizerConfig,
    Rule,
    ScheduleConfig,
)
from train.data.config import DataConfig, PackingConfig, SourceConfig
from train.distributed.fabric import build_fabric, quantized_type
from train.plan.memory import meta_model
from train.plan.plan import count_parameters
from train.trainer.build import build_parts
from train.trainer.initial_model import apply_lora, build_initial, save_lora

SECTION = LoRASection(targets=("blocks.*",), rank=2, trainable=("audio_head.*",))
LEARNT = {f"blocks.{i}.1.lora.default.{half}" for i in range(2) for half in "ab"} | {"audio_head.weight"}


def test_only_adapters_and_what_is_named_learn_and_are_stored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = ToyModel().state_dict()
    parts = adapted_parts(SECTION)
    before = {name: t.clone() for name, t in parts.objective.state_dict().items()}
    assert all(t.equal(before[f"model.{name}"]) for name, t in plain.items())
    _, weights = toy_fit(toy_config(tmp_path, lora=SECTION), parts)
    moved = {name.removeprefix("model.") for name, t in before.items() if not t.equal(weights[f"model.{name}"])}
    assert moved == LEARNT
    assert_adapters_learn(tmp_path, SECTION)
    stored = final_tensors(tmp_path)
    assert {name.removeprefix("model.model.") for name in stored if name.startswith("model.")} == LEARNT
    assert {name.removeprefix("average.model.") for name in stored if name.startswith("average.")} == LEARNT


# From 4,096 values on a parameter's state is held in 8 bits, and its tables of numbers are those of all other parameters.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rule", "rank"), [("adamw", 2), ("paged_adamw_8bit", 2), ("paged_adamw_8bit", 128)])
def test_stopped_and_resumed_it_ends_bitwise_where_an_undisturbed_one_ends(tmp_path: Path, rule: Rule, rank: int) -> None:
    section = replace(SECTION, rank=rank)
    more = {"lora": section, "optimizer": OptimizerConfig(rule, lr=1e-2)}
    _, whole = toy_fit(toy_config(tmp_path / "whole", **more), adapted_parts(section))
    stored = final_tensors(tmp_path / "whole")
    assert any(t.dtype == torch.uint8 for n, t in stored.items() if n.startswith("optimizer.")) == (rank == 128)
    stop = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None  # noqa: E731
    outcome, _ = toy_fit(toy_config(tmp_path / "stopped", **more), adapted_parts(section, stop))
    assert outcome.signal
    _, resumed = toy_fit(toy_config(tmp_path / "stopped", **more), adapted_parts(section))
    assert all(t.equal(resumed[name]) for name, t in whole.items())


def test_another_base_below_the_same_adapters_is_refused(tmp_path: Path) -> None:
    config = toy_config(tmp_path, lora=SECTION, checkpoint=CheckpointConfig(every_steps=2, every_minutes=None))
    toy_fit(replace(config, budget=BudgetConfig(steps=8)), adapted_parts(SECTION))
    parts = adapted_parts(SECTION)
    other = {name: value + 1 for name, value in parts.rows.items()}
    with pytest.raises(UserError, match="checksum"):
        toy_fit(config, replace(parts, rows=other))


SMALL = ModelConfig(
    Layout.build([512, 512, 16, 64], 256, specials=8),
    WhisperConfig(n_mels=80, width=16, heads=2, layers=1, window_seconds=4.0, mode="variable"),
    ProjectorConfig("linear"),
    DecoderConfig(width=64, layers=2, heads=2, kv_heads=1, mlp_width=64),
    codec="codec2",
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    torch.manual_seed(0)
    save_folder(tmp_path / "base", SMALL, SpeechModel(SMALL).state_dict(), Tokenizer.bytes())
    return tmp_path / "base"


def run_of(base: Path, folder: Path, section: LoRASection, precision: str = "32-true") -> FitConfig:
    source = SourceConfig(kind="spoken-digits", tasks={"A1A2": 1.0})
    return FitConfig(
        budget=BudgetConfig(steps=2),
        model=ModelSection(init_from=str(base)),
        data=DataConfig(sources=(source,), packing=PackingConfig(rows=1, length=256, buffer=2)),
        run_folder=str(folder),
        lora=section,
        fabric=FabricConfig(accelerator="cpu", devices=1, precision=precision),  # type: ignore[arg-type]
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("quantize", "precision"),
    [*((kind, "32-true") for kind in (None, "nf4", "int8")), ("nf4", "bf16-mixed"), ("nf4", "bf16-true")],
)
def test_what_comes_out_is_the_base_and_what_was_trained(base: Path, tmp_path: Path, quantize, precision: str) -> None:
    """The adapter as PEFT's folder, the model with it inside, and both again as the beginning of another run."""
    section = LoRASection(rank=2, trainable=("projector.*",), quantize=quantize)
    config = run_of(base, tmp_path / "run", section, precision)
    initial = build_initial(config.model, 0)
    fabric = build_fabric(config.fabric)
    parts = build_parts(replace(config, validation=replace(config.validation, questions=0)), initial, fabric, tmp_path / "run")
    model = initial.model
    held = [part for part in model.modules() if type(part).__name__ == "Linear4bit"]
    assert len(held) == (14 if quantize == "nf4" else 0)
    assert {part.compute_dtype for part in held} <= {torch.float32 if precision == "32-true" else torch.bfloat16}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".b") or name.startswith("projector."):
                p.add_(0.1)
    assert parts.export is not None
    parts.objective.requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_(".lora." in name or name.startswith("projector."))
    folder = parts.export(model.state_dict())
    assert folder == tmp_path / "run" / "model"
    plain, wanted = load_folder(folder).model, merged_state(model, model.state_dict())
    assert all(torch.equal(t, wanted[name].to(t.dtype)) for name, t in plain.state_dict().items())
    assert {t.dtype for t in plain.state_dict().values()} == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    adapter = load_adapter(tmp_path / "run" / "adapter")
    assert set(adapter.whole) == {"projector.project.weight", "projector.project.bias"} and len(adapter.pairs) == 14
    again = build_initial(config.model, 0).model
    begun = replace(section, init_from=str(tmp_path / "run" / "adapter"))
    apply_lora(again, begun, quantized_type(precision))
    found = merged_state(again, again.state_dict())
    for name, tensor in wanted.items():
        assert_near(found[name], tensor, 1e-6, name)
    torch.manual_seed(1)
    with pytest.raises(UserError, match="lora.init_from .*their checksum differs"):
        apply_lora(SpeechModel(SMALL), begun)


def test_a_dry_run_and_a_plan_count_the_adapters(base: Path, tmp_path: Path) -> None:
    config = run_of(base, tmp_path / "run", LoRASection(rank=2))
    wanted = 2 * 2 * (4 * 64 + 2 * (64 + 32) + 3 * 128)
    assert f"{wanted / 1e6:.2f} M trainable" in describe_run(config)
    counts = count_parameters(meta_model(config, SMALL))
    assert counts["LoRA"] == (wanted, wanted) and sum(own for _, own in counts.values()) == wanted


@pytest.mark.parametrize("base", [True, "nf4"])
def test_a_small_step_moves_every_adapter_in_bf16(tmp_path: Path, base: bool | str) -> None:
    section, parts = toy_lora(base), adapted_parts(toy_lora(base), precision="bf16-true")
    before = {name: t.clone() for name, t in parts.objective.state_dict().items() if t.is_floating_point()}
    fabric, optimizer = FabricConfig("cpu", 1, precision="bf16-true"), OptimizerConfig(**SMALL_STEPS)
    toy_fit(toy_config(tmp_path, lora=section, fabric=fabric, optimizer=optimizer), parts)
    assert_adapters_learn(tmp_path, section)
    for name, p in parts.objective.named_parameters():
        if not p.requires_grad and p.is_floating_point():
            norm = isinstance(parts.objective.get_submodule(name.rpartition(".")[0]), torch.nn.LayerNorm)
            assert p.dtype == (torch.float32 if norm else torch.bfloat16) and p.equal(before[name].to(p.dtype)), name
    assert {t.dtype for t in final_tensors(tmp_path).values()} == {torch.float32}  # average and optimizer too


def test_the_whole_model_in_bf16_is_in_bf16() -> None:
    """Without adapters nothing is kept apart."""
    module = build_fabric(FabricConfig("cpu", 1, precision="bf16-true")).setup_module(torch.nn.Linear(4, 4))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_an_adapter_that_was_written_in_bf16_learns_on_in_fp32(tmp_path: Path) -> None:
    section = LoRASection(("blocks.*",), rank=2)
    model, again = (toy_parts().objective.get_submodule("model") for _ in "ab")
    base = apply_lora(model, section)
    folder = save_lora(tmp_path, model, {n: t.bfloat16() for n, t in model.state_dict().items()}, base, None)
    apply_lora(again, replace(section, init_from=str(folder)))
    found, wanted = again.state_dict(), model.state_dict()
    pairs = [name for name in wanted if ".lora." in name]
    assert len(pairs) == 4
    assert all(found[n].dtype == torch.float32 and found[n].equal(wanted[n].bfloat16().float()) for n in pairs)


@pytest.mark.long
@pytest.mark.parametrize("base", [None, "nf4"])
def test_our_own_model_learns_in_bf16_as_in_full(tmp_path: Path, base: Literal["nf4"] | None) -> None:
    """Adapters on blocks and heads; beside them the projector, tables and a convolution, which feed what stands still."""
    targets, beside = (
        ("decoder.blocks.*", "decoder.*_head"),
        ("projector.*", "decoder.*_embedding.*", "encoder.whisper.conv1.*"),
    )
    section, found = LoRASection(targets, rank=4, trainable=beside, quantize=base), {}
    for precision in ("32-true", "bf16-true"):
        config = toy_config(
            tmp_path / precision,
            lora=section,
            fabric=FabricConfig("cpu", 1, precision=precision, checkpointing=True),  # type: ignore[arg-type]
            optimizer=OptimizerConfig(lr=5e-3),
            schedule=ScheduleConfig("constant"),
        )
        parts = real_parts("codec2", ctc=False)
        apply_lora(parts.objective.get_submodule("model"), section, quantized_type(precision))
        toy_fit(config, parts)
        found[precision] = losses(tmp_path / precision, "loss")
        learning = [(n, p) for n, p in parts.objective.named_parameters() if p.requires_grad]
        assert {p.dtype for _, p in learning} == {torch.float32}
        stored = final_tensors(tmp_path / precision)
        assert all((stored[f"optimizer.{n}.exp_avg_sq"] > 0).any() for n, _ in learning)
    full, half = found["32-true"], found["bf16-true"]
    assert half[-1] < 0.9 * half[0]
    torch.testing.assert_close(half, full, rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16), ("16-mixed", torch.float32)],
)
def test_4_bits_are_multiplied_in_the_runs_type(precision: str, wanted: torch.dtype) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32))
    section = LoRASection(("*",), rank=2, quantize="nf4", quantize_targets=("*",), trainable=("1.bias",))
    apply_lora(model, section, quantized_type(precision))
    first, last = model
    assert isinstance(first, bitsandbytes.nn.Linear4bit)
    assert first.compute_dtype == wanted == first.weight.quant_state.dtype
    assert last.compute_dtype == torch.float32  # its bias learns
