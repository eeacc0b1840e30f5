"""Laws of attached edits: they act like those of `edited`, and take nothing of the model along."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from omni.edit.deltas import Edits, attach_edits, attached, edited, edited_everywhere, find_linears
from omni.lora.attach import Selection, _add, detach, low_rank, using
from tests.close import assert_near
from tests.edit.toys import all_logits, batch_of, build, some_edits


@pytest.fixture
def name() -> str:
    return "speech"


@pytest.mark.parametrize("rank", [3, None])
def test_rows_that_name_lent_edits_have_them(model, name, rank):
    edits, ids = [some_edits(model, 1, rank), some_edits(model, 2)], batch_of(name, 1, rows=3)
    with torch.no_grad():
        plain = all_logits(model, ids)
        wanted = []
        for one in edits:
            with edited(model, one):
                wanted.append(all_logits(model, ids))
        with attached(model, [edits[0], None, edits[1], edits[0]]) as names:
            assert names[1] is None and names[0] == names[3] != names[2]
            choice = Selection(((None, names[0]), (None, names[2])), torch.tensor([2, 0, 1]))
            with using(choice):
                got = all_logits(model, ids)
            assert torch.equal(all_logits(model, ids), plain)
        for row, right in enumerate((wanted[1], plain, wanted[0])):
            assert_near(got[row], right[row], 1e-5)


def test_what_was_lent_first_may_be_taken_back_first(model, name):
    ids, one, two = batch_of(name, 1), some_edits(model, 1), some_edits(model, 2)
    state = list(model.state_dict())
    modules = [n for n, _ in model.named_modules()]
    with torch.no_grad():
        with edited(model, two):
            wanted = all_logits(model, ids)
        first, second = attach_edits(model, one), attach_edits(model, two)
        detach(model, first)
        with using(Selection(((None, second),))):
            assert_near(all_logits(model, ids), wanted, 1e-5)
        detach(model, second)
    assert list(model.state_dict()) == state and [n for n, _ in model.named_modules()] == modules
    assert not any(part._forward_hooks for part in model.modules())


def test_a_linear_that_is_used_by_its_weight_has_its_edit_too(model):
    """A head whose weight goes straight into a loss: what is added is low(x) @ b.T."""
    delta = next(iter(some_edits(model).deltas.values()))
    x = torch.randn(4, delta.shape[0])
    assert_near(delta.low(x) @ delta.up.T, delta(x), 1e-6)
    target = next(iter(some_edits(model).deltas))
    part = model.get_submodule(target)
    assert low_rank(part, x) is None
    with edited_everywhere(model, Edits({target: delta})):
        found = low_rank(part, x)
        assert found is not None
        assert_near(found[0] @ found[1].T, delta(x), 1e-6)
    assert low_rank(part, x) is None
    assert build("speech").state_dict().keys() == model.state_dict().keys()


def test_threads_may_lend_and_withdraw_at_once(model, name):
    """Sessions of several threads share one model: nothing is attached twice, lost or left."""
    linears = list(find_linears(model, some_edits(model, 1).deltas))
    mistakes: list[str] = []

    def work(seed: int) -> None:
        edits = some_edits(model, seed)
        try:
            for _ in range(60):
                own = attach_edits(model, edits)
                for target in linears:
                    part: Any = model.get_submodule(target)
                    if own not in part.lora.attached or list(part._forward_hooks.values()).count(_add) != 1:
                        mistakes.append(target)
                detach(model, own)
        except Exception as error:
            mistakes.append(repr(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not mistakes
    assert not any(hasattr(model.get_submodule(target), "lora") for target in linears)
