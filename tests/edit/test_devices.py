"""Laws of edits on a model that somebody else has spread, offloaded or quantised: the same logits as on a plain one."""

from __future__ import annotations

import copy
import itertools

import accelerate
import pytest
import torch
from torch import nn

from omni.edit.deltas import edited, edited_everywhere, find_linears, mlp_linears, weight_of
from omni.edit.mend import gradient_factors
from omni.edit.storage import merge, revert, save_merged
from omni.errors import UserError
from omni.model.linears import is_quantized, quantize
from tests.close import assert_near
from tests.edit.toys import all_logits, batch_of, build, loss_of, some_edits, some_mend


def placed(model: nn.Module, prefix: str = "") -> set[str]:
    """Paths that cover all weights, as deep as that goes."""
    found: set[str] = set()
    for name, child in model.named_children():
        below = placed(child, f"{prefix}{name}.")
        covered = all(any(f"{prefix}{name}.{weight}".startswith(f"{path}.") for path in below) for weight in child.state_dict())
        found |= below if below and covered else {prefix + name}
    return found


def spread(model: nn.Module, how: str, folder: str) -> nn.Module:
    if how == "hooks":
        return accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    if how == "map":  # linears and norms one by one, every second one in a folder
        places = zip(sorted(placed(model)), itertools.cycle(("cpu", "disk")), strict=False)
        return accelerate.dispatch_model(model, dict(places), main_device="cpu", offload_dir=folder, force_hooks=True)
    if how == "cpu":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["hooks", "map", "cpu", "disk"])
@pytest.mark.parametrize("name", ["llama", "speech"])
def test_a_dispatched_model_says_what_a_plain_one_says(name, how, tmp_path):
    plain, ids = build(name), batch_of(name, 1)
    edits = some_edits(plain).signed(plain)
    far = spread(copy.deepcopy(plain), how, str(tmp_path))
    edits.check_base(far)
    with torch.no_grad():
        before = all_logits(plain, ids)
        with edited(plain, edits):
            wanted = all_logits(plain, ids)
        assert_near(all_logits(far, ids), before, 1e-6)
        for attached in (edited, edited_everywhere):
            with attached(far, edits):
                assert_near(all_logits(far, ids), wanted, 1e-5)
            assert_near(all_logits(far, ids), before, 1e-6)
    assert float((wanted - before).norm() / before.norm()) > 0.01


@pytest.mark.parametrize("how", ["hooks", "map"])
@pytest.mark.parametrize("name", ["llama", "speech"])
def test_an_editor_makes_the_same_edit_of_a_dispatched_model(name, how, tmp_path):
    plain = build(name)
    far = spread(copy.deepcopy(plain), how, str(tmp_path))
    mend, ids = some_mend(plain), batch_of(name, 2)
    mend.train()
    mend(gradient_factors(plain, mend.shapes, ids, loss_of))  # its statistics need tokens
    one, two = mend.edit(plain, ids, loss_of), mend.edit(far, ids, loss_of)
    for target, delta in one.deltas.items():
        assert_near(two.deltas[target].weight(), delta.weight(), 1e-5)
    two.check_base(plain)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_edit_of_a_quantised_base_is_merged_into_what_it_dequantises_to(kind, tmp_path):
    model, ids = build("speech"), batch_of("speech", 1)
    quantize(model, kind, mlp_linears(model))
    parts = find_linears(model, mlp_linears(model))
    assert all(is_quantized(part) for part in parts.values())
    with torch.no_grad():
        all_logits(model, ids)  # the first pass moves an int8 weight
        dense = {target: weight_of(part).clone() for target, part in parts.items()}
        edits = some_edits(model).signed(model)
        before = all_logits(model, ids)
        with edited(model, edits):
            wanted = all_logits(model, ids)
        with edited_everywhere(model, edits):
            assert_near(all_logits(model, ids), wanted, 1e-5)
        merged = merge(model, edits)
        for target, part in find_linears(model, edits.deltas).items():
            assert torch.equal(part.weight, (dense[target].double() + edits.deltas[target].weight()).float())
        # int8 rounds what comes in too, a merged weight does not
        assert_near(all_logits(model, ids), wanted, 1e-5 if kind == "nf4" else 0.05)
        with pytest.raises(UserError, match=r"quantised.*checkpoint"):
            save_merged(tmp_path, merged)
        revert(model, merged)
        assert torch.equal(all_logits(model, ids), before)
        with pytest.raises(UserError, match=r"were never merged"):
            revert(model, merged)
