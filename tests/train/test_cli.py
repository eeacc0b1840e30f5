"""The command line: help, and one clear line with exit code 2 for every mistake."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from omni.errors import LostError, UserError
from train import cli
from train.cli import COMMANDS, main
from train.config.parse import read_fit_config

YAML = """
budget: {steps: 2}
model: {preset: nano}
data:
  sources:
    - {kind: spoken-digits, options: {arithmetic: 0.5}}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(YAML)
    return str(path)


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("letters", "word"), [(10, "wordy"), (1_000_000, "wordy"), (0, "--help")])
def test_a_reader_that_has_read_enough_is_no_error(letters: int, word: str) -> None:
    code = (
        "import sys, types; import train.cli as cli; sys.modules['wordy'] = module = types.ModuleType('wordy'); "
        f"module.main = lambda words: print('x' * {letters}) or 0; cli.COMMANDS['wordy'] = ('wordy', ''); "
        f"sys.exit(cli.main([{word!r}]))"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["fit", "FILE", "--optimizer.lr", "fast"], "error: option --optimizer.lr is 'fast'; it must be a number"),
        (
            ["fit", "FILE", "--optimizer.name", "adan"],
            "option --optimizer.name is 'adan'; it must be 'adamw', 'muon' or 'paged_adamw_8bit'; did you mean adamw?",
        ),
        (["fit", "FILE", "--optimizer.betas", "[0.5]"], "option --optimizer.betas.1 is missing; give it"),
        (["fit", "FILE", "--budget.steps", "0"], "option --budget.steps is 0; it must be greater than 0, or null"),
        (["fit", "FILE", "--data.sources.5.weight", "2"], "data.sources of FILE has 1 entries, counted from 0; 5 is none"),
        (["fit", "FILE", "--data.sources.0.weight.x", "2"], "data.sources.0.weight is {'x': 2}; it must be a number"),
        (["fit", "FILE", "stray"], "unrecognized arguments: stray; see "),
        (
            ["fit", "nowhere.yaml"],
            "configuration nowhere.yaml does not exist; give a YAML file, or a recipe's name such as nano\n",
        ),
        (["fit", ""], "option --config is empty; give a value, or leave it out\n"),
        (["edit", "apply", "TMP", "", "TMP"], "argument facts: it is empty; give a path"),
        (
            ["plan", "FILE", "--objective.ctc_weight", "1"],
            "ctc_weight is 1.0, but the model has no alignment head: set data.al",
        ),
        (["fit", "FILE", "--trainable", "projector.*"], "option --trainable is 'projector.*'; it must be a list"),
        (["fit", "FILE", "--seed", "99999999999999999999"], "seed is 99999999999999999999; it must be less than or equal to"),
        (["plan", "FILE", "--devices", "abc"], "see omni-train plan --help"),
        (["fit", "FILE", "--run_folder", "FILE", "--dry_run"], "is a file where a folder belongs; name another folder"),
        (["fit", "s3://b/run.yaml"], "configuration 's3://b/run.yaml' is not on this machine, and s3:// is not read here"),
        (["data", "prepare", "FILE", "s3://b/rows", "--read.format", "table"], "output 's3://b/rows' is not on this machine"),
    ],
)
def test_mistakes(arguments: list[str], line: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [a.replace("FILE", file).replace("TMP", str(tmp_path / "run")) for a in arguments]
    assert main(words) == 2
    out, err = capsys.readouterr()
    line = line.replace("FILE", file)
    assert line in err and err.startswith("error: ") and err.count("\n") == 1, err
    assert not out
    with pytest.raises(UserError):
        main([*words, "--debug"])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            YAML.replace("arithmetic", "arithmatic"),
            r"data\.sources\.0: the source .*unknown key arithmatic; did you mean",
        ),
        (YAML + "clip: [\n", "tiny.yaml cannot be read .*give a YAML file"),
        (YAML + "budget: {minutes: 3}\n", r"^configuration .*tiny\.yaml line 7: budget is given again, after line 2; keep"),
        ("- a\n", "holds list; it must be a mapping"),
        (YAML.replace("steps: 2", "steps: two"), r"tiny\.yaml: budget\.steps is 'two'; it must be a whole number, or null$"),
        (
            YAML.replace("spoken-digits", "web"),
            r"tiny\.yaml: data\.sources\.0: source\.kind: source 'web' is unknown; .*spoken-digits",
        ),
        (YAML + "validation:\n", r"tiny\.yaml: validation is None; it must be a mapping of keys"),
    ],
)
def test_mistakes_in_the_file(text: str, line: str, file: str) -> None:
    Path(file).write_text(text)
    with pytest.raises(UserError, match=line):
        read_fit_config([file])


@pytest.mark.parametrize("words", ["data prepare a b", "eval a b --out c", "edit apply a b c"])
def test_settings_of_a_command_are_printed_beside_its_paths(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--seed", "7", "--print_config"])
    assert end.value.code in (0, None) and "seed: 7" in capsys.readouterr().out


def test_overrides_of_every_kind(file: str) -> None:
    config, name = read_fit_config(
        ["--config", file, "--optimizer.lr=3e-4", "--trainable", "[projector.*, 're:decoder\\..*']", "--ema", "0.9",
         "--model.decoder.layers", "3", "--fabric.devices", "2", "--clip", "null", "--data.packing.rows", "4"]
    )  # fmt: skip
    assert name == "tiny"
    assert (config.optimizer.lr, config.ema, config.clip, config.fabric.devices) == (3e-4, 0.9, None, 2)
    assert config.trainable == ("projector.*", "re:decoder\\..*")
    assert config.model.decoder == {"layers": 3} and config.data.packing.rows == 4


@pytest.mark.parametrize("code", [errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSPC])
def test_what_the_system_refuses_is_one_line(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise OSError(code, os.strerror(code), "runs/x")

    monkeypatch.setattr("train.commands.fit.main", fail)
    assert main(["fit"]) == 2
    line = f"error: runs/x cannot be read or written ({os.strerror(code)}); fix that and run again\n"
    assert capsys.readouterr().err == line
    with pytest.raises(OSError, match="runs/x"):
        main(["fit", "--debug"])


@pytest.mark.parametrize(
    ("command", "said"), [("fit", ""), ("eval", "interrupted; the same command goes on with what is finished\n")]
)
def test_an_interrupted_command_says_that_it_goes_on(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"train.commands.{command}.main", fail)
    assert main([command]) == 130
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("rank", "said"), [("0", "error: DistNetworkError: Broken pipe"), ("1", "")])
def test_a_process_that_loses_the_first_one_is_silent(
    rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise torch.distributed.DistNetworkError("Broken pipe")

    monkeypatch.setattr("train.commands.fit.main", fail)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert main(["fit"]) == 1
    assert capsys.readouterr().err.partition(" (")[0].strip() == said


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_process_that_fabric_started_ends_with_the_first_one() -> None:
    child = "from train.commands.fit import _end_with_parent as f; f(); print(flush=True); import time; time.sleep(100)"
    parent = (
        "import subprocess, sys, os; "
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE); p.stdout.readline(); os._exit(0)"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TORCHELASTIC"))}
    read, write = os.pipe()  # held open by whoever is alive
    subprocess.run([sys.executable, "-c", parent], stderr=write, env={**clean, "LOCAL_RANK": "1"}, check=True)
    os.close(write)
    assert select.select([read], [], [], 10)[0] and os.read(read, 100) == b""
    os.close(read)


@pytest.mark.parametrize(
    ("parent", "count", "rank", "code"),
    [
        ("torchrun", "0", "0", -signal.SIGTERM),
        ("torchrun", "2", "0", None),
        ("torchrun", "0", "1", None),
        ("make", "0", "0", None),
    ],
)
def test_a_mistake_ends_a_torchrun_that_would_start_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], parent: str, count: str, rank: str, code: int | None
) -> None:
    """Nothing else is ended, and neither a lost process nor a disk that has failed is a mistake."""
    monkeypatch.setattr(cli, "GRACE", 0.0)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", parent]) as launcher:
        while parent.encode() not in Path(f"/proc/{launcher.pid}/cmdline").read_bytes():  # the system has just begun with it
            time.sleep(0.01)
        monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
        names = {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": count, "LOCAL_RANK": rank, "RANK": rank}
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        lost = SimpleNamespace(main=lambda words: (_ for _ in ()).throw(LostError("process 1 has died")))
        monkeypatch.setitem(sys.modules, "lost", lost)  # type: ignore[arg-type]
        monkeypatch.setitem(COMMANDS, "lost", ("lost", ""))
        assert main(["lost"]) == LostError.code and launcher.poll() is None
        assert "error: process 1 has died" in capsys.readouterr().err
        again = UserError("checkpoint x cannot be written (Input/output error)")
        again.again = True
        lost.main = lambda words: (_ for _ in ()).throw(again)
        assert main(["lost"]) == 2 and launcher.poll() is None
        assert main(["fti"]) == 2
        if code is None:
            launcher.kill()
            code = -signal.SIGKILL
        assert launcher.wait(20) == code
