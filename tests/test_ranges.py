"""Ranges and choices that are declared with a field hold wherever the dataclass is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from omni.errors import UserError
from omni.utils.ranges import check_fields, ranged


@dataclass(frozen=True)
class Drawn:
    rows: int = ranged(8, 1, 1 << 20)
    share: float = ranged(0.5, 0, below=1)
    rate: float | None = ranged(None, above=0, below=float("inf"), way=", or null for none")
    pair: tuple[float, float] = ranged((1.0, 2.0), 0, 4)
    name: Literal["adam", "muon"] | None = "adam"

    def __post_init__(self) -> None:
        check_fields(self, "part")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rows": 0}, "^part.rows is 0; it must be at least 1 and at most 1048576$"),
        ({"share": 1.0}, "part.share is 1.0; it must be at least 0 and below 1$"),
        ({"rate": 0.0}, "part.rate is 0.0; it must be above 0 and finite, or null for none$"),
        ({"pair": (2.0, 1.0)}, "part.pair is 2.0 to 1.0; lowest and highest must be at least 0 and at most 4$"),
        ({"pair": [1.0, float("nan")]}, "part.pair is 1.0 to nan"),
        ({"name": "moon"}, "part.name 'moon' is unknown; did you mean 'muon'"),
    ],
)
def test_a_value_out_of_its_range_names_key_value_and_range(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Drawn(**given)


def test_what_lies_within_is_taken() -> None:
    assert Drawn(rows=1, share=0.0, rate=1e9, pair=(0.0, 4.0), name=None) == Drawn(1, 0.0, 1e9, (0.0, 4.0), None)
    assert (Drawn().rows, Drawn.share, Drawn().pair) == (8, 0.5, (1.0, 2.0))
