"""How good an edit is: it holds, it holds in other words too, and all else stays as it was (Mitchell et al. 2022, section 4).

Dimensions: N positions with a target, V vocabulary, Q questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measures:
    """Of one edit, or the mean over several.

    Attributes:
        success: share of right answers to the edited questions.
        generalisation: share of right answers to them in other words; None where none were asked.
        locality_kl: divergence of the answers to unrelated questions, in nats a position.
        locality: share of unrelated answers that stayed the same.
    """

    success: float
    generalisation: float | None
    locality_kl: float
    locality: float


def mean_of(measures: Sequence[Measures]) -> Measures:
    """Mean over edits; ValueError where there are none."""
    if not measures:
        raise ValueError("there are no measures to take the mean of")

    def mean(values: Sequence[float | None]) -> float | None:
        there = [value for value in values if value is not None]
        return sum(there) / len(there) if there else None

    parts = {name: mean([getattr(m, name) for m in measures]) for name in Measures.__dataclass_fields__}
    return Measures(**parts)  # type: ignore[arg-type]


def kl_divergence(before: Tensor, after: Tensor) -> Tensor:
    """Mean over positions of KL(before || after) in nats, logits [N, V] each; a gradient flows through both. 0 without
    positions."""
    _alike(before, after)
    wide = torch.promote_types(before.dtype, torch.float32)
    log_p, log_q = before.to(wide).log_softmax(-1), after.to(wide).log_softmax(-1)
    each = (log_p.exp() * (log_p - log_q)).sum(-1)
    return each.sum() / max(1, len(each))


@torch.no_grad()
def tokens_right(logits: Tensor, targets: Tensor) -> float:
    """Share of positions whose likeliest token, of logits [N, V], is the target [N]."""
    return _share(logits.argmax(-1) == targets)


@torch.no_grad()
def answers_right(logits: Tensor, targets: Tensor, question: Tensor) -> float:
    """Share of questions of which every position is right.

    Args:
        logits, targets: [N, V] and [N].
        question: [N] which question a position belongs to.
    """
    right = logits.argmax(-1) == targets
    return _share(torch.stack([right[question == q].all() for q in question.unique()])) if len(question) else 0.0


@torch.no_grad()
def unchanged(before: Tensor, after: Tensor) -> float:
    """Share of positions whose likeliest token is the same in logits [N, V] before and after."""
    _alike(before, after)
    return _share(before.argmax(-1) == after.argmax(-1))


def same_answers(answers: Sequence[Any], wanted: Sequence[Any]) -> float:
    """Share of generated answers [Q] (texts, or lists of codes) that equal the wanted ones, or those of before an edit."""
    if len(answers) != len(wanted):
        raise ValueError(f"{len(answers)} answers cannot be compared with {len(wanted)}")
    return sum(a == w for a, w in zip(answers, wanted, strict=True)) / max(1, len(wanted))


def _share(right: Tensor) -> float:
    return float(right.float().mean()) if right.numel() else 0.0


def _alike(before: Tensor, after: Tensor) -> None:
    if before.shape != after.shape or before.ndim != 2:
        raise ValueError(f"logits before and after must both be [N, V], not {list(before.shape)} and {list(after.shape)}")
