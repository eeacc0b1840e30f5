"""Mistakes as users write them: each is found, with the line of the culprit and the right remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from omni.diagnostics import Finding, GraphError, Guard, check_labels, check_targets
from omni.edit.deltas import edited_everywhere
from omni.lora.attach import add_adapter
from omni.lora.config import LoRAConfig
from tests.diagnostics import programs
from tests.diagnostics.programs import WIDTH, Program, data, line_of
from tests.edit.toys import batch_of, build, loss_of, set_checkpointing, some_edits

INPLACE, TWICE = "modified by an inplace operation", "backward through the graph a second time"
KEYS = "keys = self.keys.index_copy_(1, input_pos, k)"
EMBEDDED = 'embedded = model["embedding"](words)'


class Case:
    """A program; the error it ends in, in which step; the findings' kinds; and of the first its tensor, line and remedy."""

    def __init__(
        self, make: Callable[[], Program], error: str | None, step: int, kinds: list[str], tensor: str, line: str, remedy: str
    ) -> None:
        self.make, self.error, self.step, self.kinds = make, error, step, kinds
        self.tensor, self.line, self.remedy = tensor, line, remedy


CASES = {
    "positions": Case(lambda: programs.token_by_token(True), INPLACE, 0, ["inplace", "cache", "cache"], "input_pos [1] int64",
                      "input_pos.add_(1)", "x = x + 1 for x.add_(1)"),
    "cache": Case(lambda: programs.token_by_token(False), INPLACE, 0, ["cache", "cache"], "keys [1, 6, 8] float32", KEYS,
                  "train without the cache"),
    "cache, second step": Case(lambda: programs.whole_sequence(True), TWICE, 1, ["cache", "cache"], "keys [1, 6, 8] float32",
                               KEYS, "train without the cache"),
    "statistics": Case(lambda: programs.running_statistics(False), TWICE, 1, ["stale"], "norm.square [8] float32",
                       "self.square = 0.9 * self.square + 0.1 * seen.square().mean(0)", "detach what feeds it"),
    "embedding handed in": Case(lambda: programs.embedded_once(True), TWICE, 1, ["stale"], "batch['rows'] [10, 8] float32",
                                EMBEDDED, "compute it inside the step"),
    "embedding of outside": Case(lambda: programs.embedded_once(False), TWICE, 1, ["freed"], "embedded [20, 8] float32",
                                 EMBEDDED, "compute it inside the step"),
    **{
        name: Case(lambda reentrant=reentrant: programs.masked(reentrant, True), INPLACE, 0, ["inplace"], "mask [4, 4] float32",
                   "mask.mul_(0.9).add_(0.01)", "make a new tensor instead")
        for name, reentrant in (("mask", False), ("mask, reentrant", True))
    },
    "inference": Case(lambda: programs.evaluated(False), "Inference tensors", 0, ["inference"], "table [8] float32",
                      "self.table = torch.arange(x.shape[-1]).float().cos()", "torch.no_grad(), not torch.inference_mode()"),
    "detached stages": Case(programs.stages_detached, None, 0, ["no_gradient"], "encoder.weight, encoder.bias",
                            "between = hidden.detach()", "remove the detach"),
    "reentrant": Case(lambda: programs.reentrant(False), None, 0, ["reentrant"], "block.0.weight, block.0.bias",
                      "x = checkpoint(self.block, x, use_reentrant=self.reentrant)", "use_reentrant=False"),
    "state": Case(programs.checkpointed_state, None, 0, ["recompute"], "seen [4, 8] float32",
                  "self.seen = 0.5 * self.seen.detach() + key.detach()", "hand the state in as an argument"),
    "hook": Case(lambda: programs.hook_gone(False), None, 0, ["recompute"], "",
                 "return out * 2", "until backward has run"),
}  # fmt: skip


def check(case: Case, found: list[Finding]) -> None:
    assert [f.kind for f in found] == case.kinds
    first = next((f for f in found if f.tensor == case.tensor), found[0])  # PyTorch 2.13 names a cache's values before its keys
    assert first.line is not None
    assert first.line.file == "tests/diagnostics/programs.py"
    assert (first.line.number, first.line.code) == (line_of(case.line), case.line)
    assert first.tensor == case.tensor
    assert case.remedy in first.remedy
    assert "retain" not in str(first)


@pytest.mark.parametrize("name", CASES)
def test_run_says_what_where_and_what_to_do(name):
    case = CASES[name]
    torch.manual_seed(0)
    program = case.make()
    guard = Guard(program.model, program.optimizer)
    for i in range(case.step):
        guard.run(lambda i=i: program.step(i), program.batch(i))
    if name not in ("embedding handed in", "cache", "cache, second step"):  # those show before they fail
        assert guard.findings == []
    if case.error is None:
        guard.run(lambda: program.step(case.step), program.batch(case.step), trace=True)
        check(case, guard.findings)
        return
    with pytest.raises(GraphError, match=case.error) as caught:
        guard.run(lambda: program.step(case.step), program.batch(case.step))
    check(case, caught.value.findings)
    assert type(caught.value.__cause__) is RuntimeError
    assert str(caught.value).startswith(str(caught.value.__cause__).partition(" Specify retain_graph")[0])
    assert "retain_graph" not in str(caught.value)
    assert case.line in str(caught.value)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.error is not None])
def test_the_context_manager_names_the_mistake_and_rerun_the_line(name):
    case = CASES[name]
    torch.manual_seed(0)
    program = case.make()
    guard = Guard(program.model, program.optimizer)

    def step(i: int) -> None:
        with guard.step(program.batch(i)):
            program.step(i)

    for i in range(case.step):
        step(i)
    with pytest.raises(GraphError, match=r"guard\.rerun"):
        step(case.step)
    assert case.kinds[0] in [f.kind for f in guard.findings]
    check(case, guard.rerun(lambda: step(case.step)))


@pytest.mark.parametrize("handed_in", [True, False])
def test_keeping_the_graph_silences_the_error_but_not_the_finding(handed_in):
    torch.manual_seed(0)
    program = programs.embedded_once(handed_in)
    guard = Guard(program.model, program.optimizer)

    def step(i: int) -> None:
        model = program.model
        rows = program.batch(i)["rows"] if handed_in else EMBEDDING_ROWS[0]
        model["head"](rows.tanh()).mean().backward(retain_graph=True)

    EMBEDDING_ROWS[0] = program.model["embedding"](torch.arange(20))
    guard.run(lambda: step(0), program.batch(0), trace=True)
    assert {f.kind for f in guard.findings} <= {"stale", "freed"}
    assert guard.findings[0].line is not None
    line = EMBEDDED if handed_in else 'EMBEDDING_ROWS[0] = program.model["embedding"](torch.arange(20))'
    assert guard.findings[0].line.code == line


EMBEDDING_ROWS: list = [None]


def test_two_backwards_over_one_graph_name_both_lines():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def step() -> None:
        hidden = model(data(0))
        hidden.square().mean().backward()
        hidden.mean().backward()

    with pytest.raises(GraphError) as caught:
        Guard(model).run(step)
    (finding,) = caught.value.findings
    assert finding.kind == "freed" and "call backward once" in finding.remedy
    assert finding.line is not None and finding.line.code == "hidden.mean().backward()"
    assert [place.code for place in finding.others] == ["hidden.square().mean().backward()"]


def test_weights_that_the_optimizer_steps_between_two_backwards():
    """Two losses, each stepped at once: the second backward needs weights of before."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        first, second = model(data(0)).mean(), model(data(1)).square().mean()
        first.backward()
        optimizer.step()
        second.backward()

    with pytest.raises(GraphError) as caught:
        Guard(model, optimizer).run(step)
    (finding,) = caught.value.findings
    assert finding.tensor.startswith("1.weight") and "only after every backward" in finding.remedy
    assert finding.line is not None and finding.line.code == "optimizer.step()"


def test_a_step_that_fails_says_nothing_of_gradients_that_had_no_time_to_come():
    """The last linear has its gradient from the second backward only, which fails."""
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        first, hidden = model[0](data(0)).mean(), model[0](data(1)).tanh()
        first.backward()
        optimizer.step()
        second = model[1](hidden).square().mean() + hidden.mean()
        hidden.detach().mul_(2)
        second.backward()

    guard = Guard(model, optimizer)
    with pytest.raises(GraphError) as caught, guard.step():
        step()
    assert {f.kind for f in caught.value.findings} == {"inplace"}
    assert guard.failed and {f.kind for f in guard.rerun(step)} == {"inplace"}


def test_a_step_that_cannot_be_repeated_still_ends_with_what_was_found():
    model, calls = nn.Linear(WIDTH, WIDTH), list[int]()

    def step() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("once only")
        hidden = model(data(0))
        hidden.square().mean().backward()
        hidden.mean().backward()

    guard = Guard(model)
    with pytest.raises(GraphError) as caught:
        guard.run(step)
    assert [f.kind for f in caught.value.findings] == ["freed"] == [f.kind for f in guard.findings]
    assert guard.active is None and "a second time" in str(caught.value.__cause__)


@pytest.mark.parametrize("adapters", [False, True])
def test_an_edit_that_ends_before_backward(adapters):
    model = build("speech")
    set_checkpointing(model)
    if adapters:
        add_adapter(model, LoRAConfig(rank=2))
    edits = some_edits(model)

    def step() -> None:
        with edited_everywhere(model, edits):
            ids = batch_of("speech", 1)
            with torch.autocast("cpu", enabled=False):
                loss = loss_of(model, ids)
        loss.backward()

    with pytest.raises(GraphError) as caught:
        Guard(model).run(step)
    finding = next(f for f in caught.value.findings if f.kind == "recompute")
    assert "call backward inside its scope" in finding.remedy
    assert finding.line is not None and finding.line.file == "omni/edit/deltas.py"


def test_a_loss_without_a_graph():
    model = nn.Linear(WIDTH, 1)

    def step() -> None:
        model(data(0)).mean().detach().backward()

    with pytest.raises(GraphError) as caught:
        Guard(model).run(step)
    assert [f.kind for f in caught.value.findings] == ["no_gradient"]
    assert caught.value.findings[0].line is not None
    assert caught.value.findings[0].line.code == "model(data(0)).mean().detach().backward()"


EOS, PAD = 2, 0
TOKENS = torch.tensor([[3, 4, 5, EOS, PAD], [3, 4, 5, 6, EOS], [3, 4, 5, 6, 7]])


def test_padding_that_is_the_end():
    """The usual collator: labels are the tokens, and what equals the pad id is ignored."""
    tokens = torch.tensor([[5, 6, 7, EOS, EOS, EOS], [5, 6, 7, 8, 9, EOS]])
    labels = tokens.masked_fill(tokens == EOS, -100)
    (finding,) = check_labels(tokens, labels, EOS, EOS)
    assert finding.kind == "label_end" and "mask by length" in finding.remedy and "rows 0, 1" in finding.tensor
    fixed = tokens.masked_fill(torch.arange(6) >= torch.tensor([[4], [6]]), -100)
    assert check_labels(tokens, fixed, EOS, EOS) == []


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
