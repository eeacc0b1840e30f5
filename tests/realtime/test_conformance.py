"""The conformance kit: a server that is right keeps every point, and for each point there is a fault that it finds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import numpy as np
import pytest

from tests.infer.conftest import write_question
from tests.realtime.__main__ import POINTS, main
from tests.realtime.client import address_of
from tests.realtime.fake_server import FakeServer, running
from tests.realtime.faults import FAULTS, before, put
from tests.realtime.kit import CheckedPoint, Kit

SPEECH = np.random.default_rng(0).normal(0, 8000, 4800).astype("<i2")
"""A fifth of a second that the fake server takes for speech."""


async def examined(names: list[str], timeout: float, speech: np.ndarray | None = SPEECH, **bent: object) -> list[CheckedPoint]:
    async with FakeServer(**bent) as url:
        kit = Kit(address_of(url, "any"), None, speech, timeout)
        return await kit.examine([POINTS[name] for name in names], lambda number, name: None)


@pytest.mark.long
async def test_every_point_can_fail():
    assert list(FAULTS) == list(POINTS)
    side_by_side = asyncio.Semaphore(8)

    async def one(name: str) -> CheckedPoint:
        bent, said = FAULTS[name]
        async with side_by_side:
            return (await examined([name], 1.0 if said.startswith("no ") else 5.0, **bent))[0]

    for found in await asyncio.gather(*(one(name) for name in POINTS)):
        name = found.point.name
        assert found.result == ("note" if name == "lead" else "fail"), (name, found)
        assert FAULTS[name][1] in found.reason, (name, found)


@pytest.mark.parametrize("sent", [[], {"item": 7}, {"type": 7}, {"type": "response.done", "response": "none"}])
async def test_whatever_a_server_sends_ends_a_point_and_not_the_examination(sent):
    found = await examined(["written-turn", "usage", "types", "created"], 0.3, out=lambda event: [sent, event])
    assert [one.result for one in found][2:] == ["fail", "fail"]
    assert ("built otherwise" in found[0].reason) == (sent == {"item": 7})


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command: its exit code, and what it printed on standard output and on standard error."""

    def call(*words: object) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return call


def test_a_server_that_is_right_gives_a_table_and_code_0(run, tmp_path):
    sound = write_question(tmp_path / "question.wav", 0.2)
    with running(FakeServer()) as url:
        code, out, err = run(f"{url}/v1/", "--sound", sound, "--timeout", 4, "--only", "usage, created,vad-turn")
    assert code == 0, err
    assert [line.split()[:2] for line in out.splitlines() if " kept " in line] == [
        ["created", "kept"], ["usage", "kept"], ["vad-turn", "kept"],
    ]  # fmt: skip
    assert out.rstrip().endswith("3 points: 3 kept, 0 broken")


def test_a_broken_point_is_told_with_its_event_and_gives_code_1(run):
    with running(FakeServer(**put("error", "error.code", "nothing_there"))) as url:
        code, table, _ = run(url, "--timeout", 4, "--only", "cancel-code,created")
        plain_code, plain, _ = run(url, "--timeout", 4, "--only", "cancel-code,created,vad-turn", "--json")
    assert code == plain_code == 1
    assert "error.code is \"nothing_there\", not 'response_cancel_not_active'" in table
    assert "why it matters: clients cancel" in table and '"code": "nothing_there"' in table
    found = json.loads(plain)
    assert found["counts"] == {"pass": 1, "fail": 1, "skipped": 1, "note": 0}
    assert [one["point"] for one in found["points"]] == ["created", "cancel-code", "vad-turn"]
    assert found["points"][1]["event"]["error"]["code"] == "nothing_there"


def test_mistakes_are_told_with_code_2(run, tmp_path):
    key = tmp_path / "keys"
    key.write_text("# none\n")
    refusing = before("session.created", {"type": "error", "error": {"message": "this key is not known"}})
    with running(FakeServer()) as url, running(FakeServer(**refusing)) as closed:
        for words, said in (
            ([url, "--only", "creatd"], "there is no point 'creatd'; did you mean 'created'?"),
            ([url, "--timeout", "soon"], "--timeout"),
            ([url, "--sound", "none.wav"], "none.wav"),
            ([url, "--key", "a", "--key_file", key], "not allowed with"),
            ([url, "--key_file", key], "has no key"),
            (["127.0.0.1:8000"], "is no address of a server"),
            (["ws://127.0.0.1:1"], "cannot be reached"),
            ([closed], "takes no session (this key is not known)"),
        ):
            code, _, err = run(*words)
            assert code == 2 and said in err, (words, err)
