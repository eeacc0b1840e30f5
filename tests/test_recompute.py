"""Activation checkpointing of blocks: what is computed twice, and that neither losses nor gradients change by a bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from omni.lora.attach import add_adapter
from omni.lora.config import LoRAConfig
from omni.model.recompute import Recompute
from omni.model.speech_model import SpeechModel
from tests.train.objective.test_objective import MODELS, make_examples, pack
from train.data.batching.batch import Batch
from train.distributed.fabric import compile_blocks
from train.objective.objective import Objective, targets

EVERY: tuple[Recompute, ...] = (False, True, "selective")
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")


CONFIG = replace(MODELS["codec2"], decoder=replace(MODELS["codec2"].decoder, qk_norm=True))


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def made(lora: float | None = None) -> tuple[Objective, Batch]:
    torch.manual_seed(0)
    model = SpeechModel(CONFIG)
    if lora is not None:
        model.requires_grad_(False)
        add_adapter(model, LoRAConfig(("decoder.blocks.*", "encoder.*"), 4, 8.0, lora))
        for name, p in model.named_parameters():
            if name.endswith(".b"):
                torch.nn.init.normal_(p, std=0.02)
    return Objective(model), pack(model, [make_examples(model, ["A1T1", "A1A2"])] * 2, 96)


def gradients_of(objective: Objective, batch: Batch, recompute: Recompute) -> list[Tensor]:
    """The loss and the gradients."""
    objective.model.set_checkpointing(recompute)
    objective.zero_grad()
    torch.manual_seed(1)
    loss = objective(batch, targets(batch)).total
    loss.backward()
    return [loss.detach(), *(p.grad for p in objective.parameters() if p.grad is not None)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("lora", [None, 0.0, 0.5])
def test_it_changes_no_bit(lora: float | None, half: bool) -> None:
    objective, batch = made(lora)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        plain, *others = (gradients_of(objective, batch, recompute) for recompute in EVERY)
    assert len(plain) > 20
    for found in others:
        assert len(found) == len(plain) and all(map(torch.equal, found, plain))


def test_selective_computes_products_and_attention_once_and_the_rest_twice() -> None:
    objective, batch = made()
    seen = []
    for recompute in EVERY:
        with Calls() as mode:
            gradients_of(objective, batch, recompute)
        seen.append(mode.seen)
    plain, whole, selective = seen
    assert {name: selective[name] for name in PRODUCTS} == {name: plain[name] for name in PRODUCTS}
    assert all(whole[name] > plain[name] for name in PRODUCTS if plain[name]) and plain["mm"] and plain["addmm"]
    for name in ("silu", "gelu", "rsqrt", "native_layer_norm"):
        assert plain[name] < selective[name] <= whole[name], name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [True, "selective"])
def test_the_random_state_is_kept_where_something_draws(recompute: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    real, read = torch.get_rng_state, []
    monkeypatch.setattr(torch, "get_rng_state", lambda: read.append(1) or real())
    for lora, wanted in ((None, 0), (0.0, 0), (0.5, 1)):
        objective, batch = made(lora)
        read.clear()
        gradients_of(objective, batch, recompute)
        assert (len(read) > 0) == wanted, lora


@pytest.mark.long
@pytest.mark.parametrize("recompute", EVERY)
def test_compiled_blocks_do_the_same(recompute: Recompute) -> None:
    objective, batch = made()
    wanted = gradients_of(objective, batch, recompute)
    compile_blocks(objective)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = gradients_of(objective, batch, recompute)
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu(compiled: bool) -> None:
    """The kept results are the same bits, and the memory between that of the two others."""
    objective, batch = made()
    objective.cuda()
    batch = batch.to("cuda")
    if compiled:
        compile_blocks(objective)
    with torch.autocast("cuda", torch.bfloat16):
        objective(batch, targets(batch).cuda()).total.backward()  # the libraries take their workspaces
    found, held = [], []
    for recompute in EVERY:
        objective.model.set_checkpointing(recompute)
        objective.zero_grad()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = objective(batch, targets(batch).cuda()).total
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in objective.parameters() if p.grad is not None)])
    assert min(held[0], held[2]) > held[1] and (compiled or held[0] > held[2])  # the compiler recomputes by itself
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=2e-2, atol=1e-3)
