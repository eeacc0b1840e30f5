"""How far answers move (Mitchell et al. 2022, section 4).

Dimensions: N positions with a target, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_divergence(before: Tensor, after: Tensor) -> Tensor:
    """Mean over positions of KL(before || after) in nats, logits [N, V] each; a gradient flows through both. 0 without
    positions."""
    if before.shape != after.shape or before.ndim != 2:
        raise ValueError(f"logits before and after must both be [N, V], not {list(before.shape)} and {list(after.shape)}")
    wide = torch.promote_types(before.dtype, torch.float32)
    log_p, log_q = before.to(wide).log_softmax(-1), after.to(wide).log_softmax(-1)
    each = (log_p.exp() * (log_p - log_q)).sum(-1)
    return each.sum() / max(1, len(each))
