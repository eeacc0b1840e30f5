"""Patches under FSDP2: whatever torch makes of one, the guard's word is true."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import processes
from tests.diagnostics.sharded import MOMENTS

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def said() -> dict[str, list[Any]]:
    """Of each case what torch did and what the guard found, from two processes that were launched once."""
    return two("tests.diagnostics.sharded")


def two(program: str, *arguments: str) -> dict[str, Any]:
    """What a program says on two processes."""
    both = processes.two(program, *arguments)
    assert [ended.code for ended in both] == [0, 0], both
    return json.loads(both[0].out.splitlines()[-1])


def test_functional_call_is_reported_exactly_where_it_is_ignored(said: dict[str, list[Any]]) -> None:
    cases = {name: result for name, result in said.items() if name.startswith("functional_call")}
    assert len(cases) == 24
    for name, (outcome, findings) in cases.items():
        assert outcome in ("taken", "ignored", "refused"), name
        assert bool(findings) == (outcome == "ignored"), (name, outcome, findings)
        assert all("FSDP2 gathers its own shards, whatever functional_call was given" in what for what in findings), name
    assert "ignored" in [outcome for outcome, _ in cases.values()], "the trap is gone: say so in docs/gradients.md"


@pytest.mark.parametrize("where", ["together", "apart"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_patches_of_an_inner_module(said: dict[str, list[Any]], where: str, moment: str) -> None:
    """Hooks and a forward around the module's own take part, gathered or not; one of another module does not."""
    for how in ("hook", "forward", "none"):
        assert said[f"{how}, {where}, {moment}"] == ["taken", []], how
    outcome, findings = said[f"forward of another, {where}, {moment}"]
    assert outcome == "ignored" and len(findings) == 1 and "bound to another module" in findings[0]


@pytest.mark.parametrize("where", ["together", "apart"])
def test_a_module_that_is_not_called(said: dict[str, list[Any]], where: str) -> None:
    """That its weights were gathered for it is no use of them."""
    outcome, findings = said[f"not called, {where}, after evaluation"]
    assert outcome == "other" and findings == ["weight, bias takes no part in forward: the module is not called"]


@pytest.mark.parametrize("traced", [False, True])
def test_a_step_after_an_evaluation(said: dict[str, list[Any]], traced: bool) -> None:
    """The root is gathered when the step starts; what its optimizer owns are the shards."""
    sound, lost = said[f"evaluated, traced {traced}"]
    assert sound == [] and lost == ([] if traced else ["not_owned 0.bias"])  # traced, the root's are idle


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return two("tests.diagnostics.failing", str(tmp_path_factory.mktemp("failing")))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("model", "kind", "line"),
    [("Written", "inplace", "y.mul_(2)  # the culprit"), ("Keeping", "freed", "self.last = x.mean()  # the culprit")],
)
def test_a_watched_run_that_fails(failures: dict[str, str], strategy: str, model: str, kind: str, line: str) -> None:
    """As with one process: one finding, the true one."""
    said = failures[f"{strategy} {model}"]
    assert said.startswith("step 1: ") and f"in forward: {line}" in said
    assert said.count("remedy:") == 1 and f"\n[{kind}] " in said
