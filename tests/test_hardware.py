"""What a processor multiplies by itself, and what follows from it: precision, attention, norms."""

from __future__ import annotations

import warnings
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F

from omni.model.attention import attention
from omni.model.blocks import RMSNorm
from omni.utils.hardware import PEAK_FLOPS, multiplies_bf16, peak_flops
from train.config.sections import FabricConfig


def pretend(monkeypatch: pytest.MonkeyPatch, **capabilities: bool | str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(capabilities))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", ["avx512_bf16", "amx_bf16"])
def test_precision_auto_is_bf16_where_the_processor_multiplies_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, **{name: True, "cpu_name": "AMD EPYC 9B14" if name == "avx512_bf16" else "Intel Xeon"})
    assert [multiplies_bf16(kind) for kind in ("cpu", "auto", "gpu", "cuda", "mps")] == [True, True, False, False, False]
    assert FabricConfig(accelerator="cpu", precision="auto").decided().precision == "bf16-mixed"
    assert FabricConfig(accelerator="mps", precision="auto").decided().precision == "32-true"
    assert FabricConfig(accelerator="cpu").precision == "32-true"


@pytest.mark.parametrize("capabilities", [{"avx512_bf16": False}, {"avx512_bf16": True, "cpu_name": "Intel Xeon"}, {}])
def test_precision_auto_is_fp32_elsewhere(monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool | str]) -> None:
    pretend(monkeypatch, avx512_f=True, **capabilities)
    assert not multiplies_bf16("cpu") and not multiplies_bf16()
    assert FabricConfig(precision="auto").decided().precision == "32-true"


def triple(heads: tuple[int, int], learns: bool, length: int = 24) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    shapes = [(2, heads[i > 0], length, 16) for i in range(3)]
    return [torch.randn(shape, generator=dice).bfloat16().requires_grad_(learns) for shape in shapes]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("masked", [None, torch.bool, torch.bfloat16])
def test_attention_that_learns_in_bf16_is_taken_in_fp32(masked: torch.dtype | None, autocast: bool) -> None:
    qkv, grouped = triple((4, 2), True), True
    mask = None
    if masked is not None:
        seen = torch.arange(24) < torch.tensor([24, 9])[:, None, None, None]
        mask = seen if masked == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -1e4).to(masked)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = attention(*qkv, mask, mask is None, grouped)
    assert got.dtype == torch.bfloat16
    gradients = torch.autograd.grad(got.float().square().sum(), qkv)
    whole = [x.detach().double().requires_grad_() for x in qkv]
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    want = F.scaled_dot_product_attention(*whole, attn_mask=wide, is_causal=mask is None, enable_gqa=grouped)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)  # half a unit in the last place of bf16
    for mine, true in zip(gradients, torch.autograd.grad(want.square().sum(), whole), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_without_gradient_is_torchs_own(dtype: torch.dtype) -> None:
    qkv = [x.to(dtype) for x in triple((4, 4), False)]
    assert attention(*qkv, causal=True).equal(F.scaled_dot_product_attention(*qkv, is_causal=True))
    with torch.no_grad():
        learning = [x.detach().requires_grad_() for x in qkv]
        assert attention(*learning, causal=True).equal(F.scaled_dot_product_attention(*qkv, is_causal=True))


def test_a_norm_in_fp32_takes_bf16_as_it_is_and_does_not_warn() -> None:
    norm = RMSNorm(32)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        got = norm(x)
    torch.testing.assert_close(got, F.rms_norm(x.float(), (32,), norm.weight, norm.eps))


@pytest.mark.parametrize(
    ("devices", "nodes", "processes"), [(1, 1, 1), (4, 2, 8), ("3", 1, 3), ("0,1", 1, 2), ("auto", 1, None), (-1, 1, None)]
)
def test_a_configuration_counts_its_processes(devices: int | str, nodes: int, processes: int | None) -> None:
    assert FabricConfig(devices=devices, num_nodes=nodes).processes == processes


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10", None),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Quadro RTX 6000", None),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("Tesla V100-PCIE-32GB", "V100-PCIE"),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_a_driver_s_name_has_its_own_peak(monkeypatch: pytest.MonkeyPatch, name: str, known: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == (None if known is None else PEAK_FLOPS[known])
