"""The divergence of answers against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from omni.edit.mend import kl_divergence
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
