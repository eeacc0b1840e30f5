"""Checks of a batch: the end of a sequence that is never trained, streams and tasks without a target."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omni.diagnostics import Guard, check_labels, check_targets

EOS, PAD = 2, 0
TOKENS = torch.tensor([[3, 4, 5, EOS, PAD], [3, 4, 5, 6, EOS], [3, 4, 5, 6, 7]])


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("masked", [[], [0], [1], [0, 1]])
def test_rows_whose_end_is_masked(shifted, masked):
    """The prompt (first token) is never trained; the third row is cut off and has no end to learn."""
    labels = TOKENS.clone()
    labels[:, 0] = -100
    labels[0, 4] = -100
    for row in masked:
        labels[row, (labels[row] == EOS).nonzero()[0]] = -100
    if shifted:
        labels = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], dim=1)
    found = check_labels(TOKENS, labels, EOS, PAD)
    assert len(found) == bool(masked)
    if masked:
        assert f"rows {', '.join(map(str, masked))};" in found[0].tensor
        assert found[0].what.startswith(f"{len(masked)} of 3 rows")
        column = [3, 4][masked[0]] - shifted
        assert found[0].tensor.endswith(f"row {masked[0]}, column {column}")


def test_rows_without_labels_and_other_marks():
    assert check_labels(TOKENS, torch.full_like(TOKENS, -1), EOS, PAD, ignore=-1) == []
    labels = TOKENS.masked_fill(TOKENS == EOS, -1)
    assert len(check_labels(TOKENS, labels, EOS, PAD, ignore=-1)) == 1


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"must both be \[B, T\]"):
        check_labels(TOKENS, TOKENS[:, 1:], EOS, PAD)


def test_streams_without_a_target():
    (finding,) = check_targets(torch.tensor([4, 0, 3]), ["audio0", "audio1", "text"])
    assert finding.what.startswith("audio1 got no target") and "at least 1" in finding.remedy
    assert check_targets(torch.tensor([4, 1, 3]), ["audio0", "audio1", "text"]) == []


def test_names_must_fit():
    with pytest.raises(ValueError, match="longer"):
        check_targets(torch.ones(3), ["a"])


# --- a user's own batch -----------------------------------------------------------------------------------------------

FILLED = torch.tensor([[3, 4, 5, EOS, EOS, EOS], [3, 4, 5, 6, 7, EOS]])
"""Rows that are filled up with the end."""
BY_ID, BY_LENGTH = FILLED.masked_fill(FILLED == EOS, -100), FILLED.clone()
BY_LENGTH[0, 4:] = -100


def found_in(*batches: Any, end_id: int | None = EOS) -> list[str]:
    """What a guard says of steps with these batches."""
    guard, model = Guard(end_id=end_id), nn.Linear(1, 1)
    for batch in batches:
        guard.run(lambda: model(torch.ones(1)).sum().backward(), batch)
    return [f.what for f in guard.findings]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda ids, labels: {"input_ids": ids, "labels": labels},
        lambda ids, labels: UserDict(tokens=ids, targets=labels),
        lambda ids, labels: [SimpleNamespace(ids=ids, label=labels, weight=torch.ones(2, 6))],
    ],
)
def test_a_guard_that_knows_the_end_finds_it_masked(wrap: Any) -> None:
    (what,) = found_in(*[wrap(FILLED, BY_ID)] * 2)
    assert what.startswith("2 of 2 rows train no end (pad and eos are both 2")
    assert found_in(wrap(FILLED, BY_LENGTH), wrap(FILLED, BY_ID)) == []  # its ends are taught
    assert found_in(wrap(FILLED, BY_ID), end_id=None) == []


@pytest.mark.parametrize(
    ("ids", "labels"),
    [
        (TOKENS[2:], TOKENS[2:]),  # cut off
        (FILLED, torch.full_like(FILLED, -100)),
        (FILLED, BY_ID.float()),
        (FILLED, BY_ID[:, 1:]),
        (FILLED[0], BY_ID[0]),
    ],
)
def test_a_guard_that_knows_the_end_gives_no_false_alarm(ids: Tensor, labels: Tensor) -> None:
    assert found_in({"input_ids": ids, "labels": labels}, {"labels": BY_ID}, None, FILLED) == []
