"""`--ray` of the commands on data: the processes of a cluster give the bytes of this machine's."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from omni.errors import UserError
from tests.train.data.inspect.toys import row, stored
from tests.train.data.prepare.test_prepare import files_of, made
from tests.train.data.prepare.toys import Deadly, ToySource
from train.cli import main
from train.data import executor
from train.data.inspect import scan


class DeadlyOnce(ToySource):
    """Ends the process that reads one of these items first; the next one goes past it."""

    def __init__(self, folder: Path, items: tuple[int, ...]) -> None:
        super().__init__(400, "text", broken=(3, 70))
        self.folder, self.items = folder, items

    def row(self, index: int):
        if index in self.items:
            try:
                (self.folder / str(index)).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return super().row(index)


@pytest.fixture(scope="module")
def two():
    """A cluster with two cores: that of `RAY_ADDRESS`, or one on this machine."""
    ray = pytest.importorskip("ray")
    local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": 2, "include_dashboard": False}
    os.environ.update({"RAY_memory_monitor_refresh_ms": "0", "RAY_AUTH_MODE": "disabled"})
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ray.init(os.environ.get("RAY_ADDRESS", "local"), log_to_driver=False, **local)
    yield
    ray.shutdown()


@pytest.mark.long
def test_a_cluster_writes_the_bytes_of_one_process_whichever_workers_die(two, tmp_path, capfd):
    (tmp_path / "killed").mkdir()
    kills = (5, 40, 41, 100, 131, 160, 222, 300, 370, 399)
    speak = {"speak": "question", "voice": "tests.train.data.prepare.toys:beep", "codec": ""}
    done = made(tmp_path / "ray", DeadlyOnce(tmp_path / "killed", kills), workers=2, ray="auto", **speak)
    assert sorted(int(path.name) for path in (tmp_path / "killed").iterdir()) == sorted(kills)
    assert done == made(tmp_path / "whole", ToySource(400, "text", broken=(3, 70)), **speak)
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "whole")
    made(tmp_path / "sound", ToySource(70), ray="auto")
    made(tmp_path / "sound whole", ToySource(70))
    assert files_of(tmp_path / "sound") == files_of(tmp_path / "sound whole")


@pytest.mark.long
def test_a_cluster_finds_what_one_process_finds(two, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scan, "PIECE", 7)
    data = stored(tmp_path / "data", [row(i % 23) for i in range(40)], per_file=9)
    (tmp_path / "rules.yaml").write_text("drop_duplicates: [row]")
    told = []
    for name, chosen in (("ray", ["--ray", "auto"]), ("one", ["--workers", "0"])):
        options = ["--progress", "off", *chosen]
        findings, kept, out = (str(tmp_path / f"{name}{kind}") for kind in (".jsonl", "-kept", "-stats"))
        assert main(["data", "validate", str(data), "--findings", findings, *options]) == 0
        assert main(["data", "filter", str(data), kept, "--rules", str(tmp_path / "rules.yaml"), *options]) == 0
        assert main(["data", "stats", str(data), "--out", out, *options]) == 0
        told.append(capsys.readouterr().out.replace(str(tmp_path / name), "OUT"))
    assert told[0] == told[1] and "duplicate_row" in told[0] and "23 of 40 rows kept" in told[0]
    for place in ("kept", "stats"):
        assert files_of(tmp_path / f"ray-{place}") == files_of(tmp_path / f"one-{place}")
    assert (tmp_path / "ray.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


@pytest.mark.long
def test_what_a_cluster_cannot_do_is_named(two, tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "RETRIES", 1)
    with pytest.raises(UserError, match=r"items 32 to 63 end each process that works on them \(2 tries\)"):
        made(tmp_path / "out", Deadly(64), ray="auto")
    with pytest.raises(UserError, match=r"the cluster has 2 CPU and a worker needs 3: give another --threads"):
        made(tmp_path / "out", ToySource(64), ray="auto", threads=3)
    with pytest.raises(UserError, match=r"has 0 GPU and a worker needs 1: give another --device"):
        made(tmp_path / "out", ToySource(64), ray="auto", device="cuda")
    assert not list(tmp_path.iterdir())
