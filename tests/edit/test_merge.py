"""Laws of edits in the weights: exactly in, and bit for bit out again."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from omni.edit.deltas import Delta, checksum, edited, find_linears, is_transposed, mlp_linears, shape_of, stack
from omni.edit.storage import load_edits, load_merged, merge, revert, save_merged
from omni.errors import UserError
from tests.close import assert_near
from tests.edit.toys import batch_of, logits_of, some_edits


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor) -> Tensor:
    return logits_of(model, ids)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: nn.Module, wanted: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == wanted.keys() and all(torch.equal(now[name], tensor) for name, tensor in wanted.items())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [3, None])
def test_merged_edits_are_exact_and_come_out_bit_for_bit(model, name, rank, dtype):
    model.to(dtype)
    before, ids = state(model), batch_of(name, 1)
    edits = some_edits(model, rank=rank).signed(model)
    with edited(model, edits):
        wanted = logits(model, ids)
    merged = merge(model, edits)
    for key, part in find_linears(model, edits.deltas).items():
        delta = edits.deltas[key]
        a = torch.eye(len(delta.b), dtype=torch.double) if delta.a is None else delta.a.double()
        change = float(delta.lr) * (a.T @ delta.b.double())
        exact = before[f"{key}.weight"].double() + (change if is_transposed(part) else change.T)
        assert torch.equal(part.weight, exact.to(dtype)), key
    assert_near(logits(model, ids).float(), wanted.float(), 1e-5 if dtype == torch.float32 else 0.05)
    revert(model, merged)
    assert same(model, before)


def test_only_what_was_merged_is_reverted_and_only_once(model):
    edits = some_edits(model).signed(model)
    other = copy.deepcopy(model)
    merged = merge(model, edits)
    after = state(model)
    with pytest.raises(UserError, match=r"merged.*already"):
        merge(model, edits)
    with pytest.raises(UserError, match=r"were never merged into it"):
        revert(other, merged)
    assert same(model, after)
    revert(model, merged)
    with pytest.raises(UserError, match=r"were never merged into it, or were taken out"):
        revert(model, merged)
    merge(model, edits)
    find_linears(model, edits.deltas).popitem()[1].weight.data[0, 0] += 1
    trained = state(model)
    with pytest.raises(UserError, match=r"trained since"):
        revert(model, merged)
    assert same(model, trained)


def test_two_edits_are_merged_as_one_or_one_upon_the_other(model, name):
    one, two, ids = some_edits(model, 1), some_edits(model, 2, rank=None), batch_of(name, 1)
    with edited(model, [one, two]):
        wanted = logits(model, ids)
    both = merge(model, stack([one.signed(model), two.signed(model)]))
    assert_near(logits(model, ids), wanted, 1e-5)
    revert(model, both)
    first = merge(model, one.signed(model))
    second = merge(model, two.signed(model))
    assert_near(logits(model, ids), wanted, 1e-5)
    with pytest.raises(UserError, match=r"different weights.*one base"):
        stack([one.signed(model), replace(two, base=second.after | {k: 1 for k in second.after})])
    revert(model, second)
    revert(model, first)


def test_what_reverts_outlives_the_process(model, tmp_path):
    before = state(model)
    save_merged(tmp_path / "undo", merge(model, some_edits(model).signed(model)))
    revert(model, load_merged(tmp_path / "undo"))
    assert same(model, before)
    facts = json.loads((tmp_path / "undo" / "originals.json").read_text())
    facts["after"].popitem()
    (tmp_path / "undo" / "originals.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"unedited"):
        load_merged(tmp_path / "undo")
    with pytest.raises(UserError, match=r"has no edits.json \(it has originals.json\)"):
        load_edits(tmp_path / "undo")


def test_the_last_mlps_are_edited_by_default(model, name):
    wanted = {
        "gpt2": [f"transformer.h.{i}.mlp.{part}" for i in (1, 2) for part in ("c_fc", "c_proj")],
        "llama": [f"model.layers.{i}.mlp.{part}" for i in (1, 2) for part in ("up_proj", "down_proj")],
        "speech": [f"decoder.blocks.{i}.mlp.{part}" for i in (2, 3) for part in ("up", "down")],
    }
    assert mlp_linears(model, 2) == wanted[name]
    with pytest.raises(UserError, match=r"edits of 9 blocks: the model has \d; choose from 1 to"):
        mlp_linears(model, 9)
    with pytest.raises(UserError, match=r"no blocks with mlp.up and mlp.down; name the linears to edit"):
        mlp_linears(nn.Linear(2, 2))


def test_a_linear_is_named_once():
    linear = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"\bb\b.*same linear as a\b"):
        find_linears(nn.ModuleDict({"a": linear, "b": linear}), ["a", "b"])


def test_a_checksum_sees_every_bit_and_only_the_linears_own():
    linear = nn.Linear(3, 2)
    before = checksum(linear)
    linear.lora = nn.Linear(2, 2)
    assert checksum(linear) == before
    assert shape_of(linear) == (3, 2)
    for change in (
        lambda: linear.bias.data.neg_(),
        lambda: linear.weight.data.view(torch.int32)[1, 2].bitwise_xor_(1),
        lambda: setattr(linear, "weight", nn.Parameter(linear.weight.detach().view(3, 2).contiguous())),
        lambda: linear.to(torch.bfloat16),
    ):
        change()
        assert checksum(linear) != before
        before = checksum(linear)
    assert Delta(torch.ones(2, 4), torch.ones(2, 3)).shape == (3, 4) and Delta(torch.ones(3, 4)).shape == (3, 4)
