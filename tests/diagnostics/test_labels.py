"""Checks of a batch: the end of a sequence that is never trained, streams and tasks without a target."""

from __future__ import annotations

import pytest
import torch

from omni.diagnostics import check_labels, check_targets

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
        assert found[0].message.startswith(f"{len(masked)} of 3 rows")
        column = [3, 4][masked[0]] - shifted
        assert found[0].tensor.endswith(f"row {masked[0]}, column {column}")


def test_rows_without_labels_and_other_marks():
    assert check_labels(TOKENS, torch.full_like(TOKENS, -1), EOS, PAD, ignore=-1) == []
    labels = TOKENS.masked_fill(TOKENS == EOS, -1)
    assert len(check_labels(TOKENS, labels, EOS, PAD, ignore=-1)) == 1


def test_streams_without_a_target():
    (finding,) = check_targets(torch.tensor([4, 0, 3]), ["audio0", "audio1", "text"])
    assert finding.message.startswith("audio1 got no target") and "at least 1" in finding.remedy
    assert check_targets(torch.tensor([4, 1, 3]), ["audio0", "audio1", "text"]) == []
