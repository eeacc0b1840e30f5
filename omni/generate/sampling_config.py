"""Settings of sampling; `omni.generate.sampling` applies them."""

from __future__ import annotations

from dataclasses import dataclass

from omni.generate.bounds import check_number
from omni.generate.results import brief


@dataclass(frozen=True)
class Sampling:
    """How an id is chosen from its logits. Applied in this order: repetition penalty, temperature, top-k, top-p.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest id (greedy), and top-k and top-p have no
            say.
        top_k: keep the k likeliest ids; 0 keeps all.
        top_p: keep the smallest set of likeliest ids whose probabilities (after top-k) sum to at least p.
            Without a `top_k` beside it this sorts the whole vocabulary at each step.
        repetition_penalty: the logits of ids that the answer already has on this stream are divided by it
            where positive and multiplied where negative (Keskar et al. 2019, "CTRL"); 1 changes nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
            check_number(name, getattr(self, name), as_what=f"sampling: {name}")

    def __repr__(self) -> str:
        return brief(self)
