"""Measures of edits against torch's own, and by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from omni.edit.metrics import Measures, answers_right, kl_divergence, mean_of, same_answers, tokens_right, unchanged
from tests.close import assert_near


def test_kl_is_torchs():
    torch.manual_seed(0)
    before, after = torch.randn(5, 7) * 3, (torch.randn(5, 7) * 3).requires_grad_()
    wanted = F.kl_div(after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="batchmean")
    got = kl_divergence(before, after)
    assert_near(got, wanted, 1e-5)
    assert_near(torch.autograd.grad(got, after)[0], torch.autograd.grad(wanted, after)[0], 1e-5)
    assert float(kl_divergence(before, before)) == 0 and float(kl_divergence(before[:0], before[:0])) == 0
    assert kl_divergence(before.bfloat16(), before.bfloat16() + 1).dtype == torch.float32
    with pytest.raises(ValueError, match=r"must both be \[N, V\], not \[5, 7\] and \[4, 7\]"):
        kl_divergence(before, after[:4])


def test_shares():
    logits = F.one_hot(torch.tensor([0, 1, 2, 1, 0]), 3).float()
    targets = torch.tensor([0, 1, 1, 1, 2])
    assert tokens_right(logits, targets) == pytest.approx(3 / 5)
    assert answers_right(logits, targets, torch.tensor([4, 4, 2, 2, 7])) == pytest.approx(1 / 3)
    assert unchanged(logits, logits.roll(1, 0)) == pytest.approx(1 / 5)
    assert unchanged(logits, torch.cat([logits[:4], logits[:1] + 9])) == 1.0
    assert unchanged(logits[:0], logits[:0]) == tokens_right(logits[:0], targets[:0]) == 0.0
    assert same_answers(["a", [1, 2]], ["a", [1, 3]]) == 0.5
    with pytest.raises(ValueError, match=r"1 answers cannot be compared with 2"):
        same_answers(["a"], ["a", "b"])


def test_means_over_edits_leave_out_what_was_not_asked():
    mean = mean_of([Measures(1.0, None, 0.2, 1.0), Measures(0.0, 0.5, 0.4, 0.5)])
    assert mean == Measures(0.5, 0.5, pytest.approx(0.3), 0.75)
    assert mean_of([Measures(1.0, None, 0.2, 1.0)]).generalisation is None
    with pytest.raises(ValueError, match=r"no measures"):
        mean_of([])
