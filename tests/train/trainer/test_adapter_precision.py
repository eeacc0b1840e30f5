"""Laws of adapters in bf16: what is trained is held in fp32, so that small steps count, and 4 bits are multiplied in bf16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from omni.lora.attach import add_adapter
from omni.lora.config import LoRAConfig
from omni.model.linears import quantize
from tests.train.distributed.test_fabric import losses, make_together
from tests.train.distributed.test_precision import real_parts
from tests.train.toys import adapted_parts, assert_adapters_learn, final_tensors, toy_config, toy_fit, toy_lora, toy_parts
from train.config.sections import CheckpointConfig, FabricConfig, LoRASection, OptimizerConfig, ScheduleConfig
from train.distributed.fabric import build_fabric, quantized_type
from train.trainer.initial_model import apply_lora, save_lora

SMALL = {"lr": 2.5e-5, "weight_decay": 0.0}
"""As in the Mistral recipes: from 2^-7 on such a step is less than half a unit in the last place of bf16."""


@pytest.mark.parametrize("base", [True, "nf4"])
def test_a_small_step_moves_every_adapter_in_bf16(tmp_path: Path, base: bool | str) -> None:
    section, parts = toy_lora(base), adapted_parts(toy_lora(base), precision="bf16-true")
    before = {name: t.clone() for name, t in parts.objective.state_dict().items() if t.is_floating_point()}
    fabric, optimizer = FabricConfig("cpu", 1, precision="bf16-true"), OptimizerConfig(**SMALL)
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs in bf16-true: alone, in two processes, and in two sharded ones that are stopped and go on."""
    top, together = tmp_path_factory.mktemp("adapters"), []
    for base in (True, "nf4"):
        config = toy_config(
            top / f"{base}-one",
            lora=toy_lora(base),
            fabric=FabricConfig("cpu", 1, precision="bf16-true"),
            optimizer=OptimizerConfig(**SMALL),
            checkpoint=CheckpointConfig(every_steps=3, every_minutes=None),
        )
        toy_fit(config, adapted_parts(toy_lora(base), precision="bf16-true"))
        for name, strategy, kill in (
            ("ddp", "ddp", None),
            ("fsdp", "fsdp", None),
            ("cut", "fsdp", ["SIGTERM", 3]),
            ("cut", "fsdp", None),
        ):
            fabric = {"devices": 2, "strategy": strategy, "precision": "bf16-true"}
            together.append(
                {"folder": str(top / f"{base}-{name}"), "fabric": fabric, "lora": base, "optimizer": SMALL, "kill": kill}
            )
    make_together(together)
    return top


@pytest.mark.long
@pytest.mark.parametrize("base", [True, "nf4"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_learns_in_bf16(runs: Path, strategy: str, base: bool | str) -> None:
    ours, one = final_tensors(runs / f"{base}-{strategy}"), final_tensors(runs / f"{base}-one")
    assert ours.keys() == one.keys()
    assert_adapters_learn(runs / f"{base}-{strategy}", toy_lora(base))
    torch.testing.assert_close(losses(runs / f"{base}-{strategy}"), losses(runs / f"{base}-one"), rtol=1e-3, atol=1e-3)
    for name, tensor in one.items():
        if name.startswith("model."):  # eight steps of Adam, each about as long as the rate
            assert ((ours[name] - tensor).abs() < SMALL["lr"]).float().mean() > 0.99, name


@pytest.mark.long
@pytest.mark.parametrize("base", [True, "nf4"])
def test_stopped_in_bf16_they_go_on_bitwise(runs: Path, base: bool | str) -> None:
    cut, whole = final_tensors(runs / f"{base}-cut"), final_tensors(runs / f"{base}-fsdp")
    assert cut.keys() == whole.keys() and all(tensor.equal(cut[name]) for name, tensor in whole.items())


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


# --- products of 4 bits -----------------------------------------------------------------------------------------------


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


def test_products_in_bf16_are_those_in_fp32_but_for_their_rounding() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(256, 128)
    x, gradient = torch.randn(8, 256), torch.randn(8, 128)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Sequential(torch.nn.Linear(256, 128))
        model[0].load_state_dict(plain.state_dict())
        quantize(model, "nf4", ["*"], dtype)
        torch.manual_seed(1)
        add_adapter(model, LoRAConfig(("*",), rank=4))
        given = x.clone().requires_grad_()
        out = model(given)
        out.backward(gradient)
        found.append((out.detach(), given.grad, model[0].weight.data))
    (full, full_grad, packed), (half, half_grad, same) = found
    assert packed.equal(same)  # the same 4 bits
    for exact, rounded in ((full, half), (full_grad, half_grad)):
        assert not exact.equal(rounded)
        assert (exact - rounded).norm() < 2**-7 * exact.norm()
