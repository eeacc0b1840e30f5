"""Methods against each other over seeds: what is run, what is counted, what is shown; and the table of costs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from train.commands.balance import ALL, JSON, PICTURE, answered, compare, main, measure, shown, variant, write
from train.config.parse import read_fit_config
from train.config.run import FitConfig
from train.trainer.validation import ANSWERS

RECIPE = "configs/nano-balance.yaml"


def faked(made: list[FitConfig]) -> Callable[[FitConfig], SimpleNamespace]:
    """A run that writes answers: method upgrad is right more often, and so are later seeds."""

    def run(config: FitConfig) -> SimpleNamespace:
        made.append(config)
        folder = Path(config.run_folder) / "validation"
        folder.mkdir(parents=True, exist_ok=True)
        assert config.balance is not None
        right = config.seed + (4 if config.balance.method == "upgrad" else 0)
        lines = [{"task": "A1T1", "exact": i < right} for i in range(10)]
        lines += [{"task": "T1A2", "exact": i < 5} for i in range(10)] + [{"task": "T1A1", "exact": None}]
        (folder / "step-00000009.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (folder / "step-00000001.jsonl").write_text("")
        return SimpleNamespace(signal=0)

    return run


@pytest.mark.usefixtures("whole_pictures")
def test_runs_differ_in_method_and_seed_only(tmp_path: Path) -> None:
    made: list[FitConfig] = []
    config, _ = read_fit_config([RECIPE, "--balance.losses", "mean"])
    found = compare(config, ["equal", "upgrad"], [1, 2, 3], tmp_path, faked(made), lambda line: None)
    assert [(c.balance.method, c.balance.losses, c.seed, c.data.seed) for c in made if c.balance] == [
        (method, "mean", seed, seed) for seed in (1, 2, 3) for method in ("equal", "upgrad")
    ]
    assert len({c.run_folder for c in made}) == 6 and len({c.budget for c in made}) == 1
    assert list(found["equal"]) == ["A1T1", "T1A2", ALL]
    assert found["upgrad"]["A1T1"].tolist() == [[5, 10], [6, 10], [7, 10]]
    figures = measure(found)
    gain, share = figures["upgrad"]["A1T1"][1], figures["equal"]["A1T1"][0]
    assert (gain.value, gain.low, gain.high) == pytest.approx((0.4, 0.4, 0.4))  # paired by seed: the same each time
    assert share.value == pytest.approx(0.2) and 0.1 <= share.low < share.value < share.high <= 0.3
    write(found, figures, [1, 2, 3], tmp_path)
    data = json.loads((tmp_path / JSON).read_text())
    assert data["methods"]["upgrad"][ALL]["more_than_equal"]["value"] == pytest.approx(0.2)
    assert (tmp_path / PICTURE).stat().st_size > 5000
    _, _, rows = shown(figures, 3)
    assert len(rows) == 6
    assert [row[2] for row in rows[:2]] == ["20.0 %", "60.0 %"] and rows[1][4] == "+40.0 points"


def test_a_level_stands_behind_its_method(tmp_path: Path) -> None:
    config, _ = read_fit_config([RECIPE, "--balance.method", "mgda", "--balance.settings", "{normalize: l2}"])
    levels = {m: variant(config, m, 1, tmp_path) for m in ("mgda", "mgda:parameters", "upgrad")}
    sections = {m: c.balance for m, c in levels.items()}
    assert [s.at for s in sections.values() if s] == ["features", "parameters", "features"]
    assert [s.settings for s in sections.values() if s] == [{"normalize": "l2"}, {}, {}]
    assert len({c.run_folder for c in levels.values()}) == 3
    config, _ = read_fit_config([RECIPE, "--balance", "{method: mgda, level: parameters, separate: ['projector.*']}"])
    sections = {m: variant(config, m, 1, tmp_path).balance for m in ("equal", "upgrad", "upgrad:parameters")}
    assert [s.separate for s in sections.values() if s] == [("*_head.*",), ("*_head.*",), ("projector.*",)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_run_that_a_signal_stops_ends_the_command_with_the_signal_s_code(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("train.trainer.build.fit", lambda config: SimpleNamespace(signal=number))
    with pytest.raises(SystemExit) as ended:
        main([RECIPE, "--out", str(tmp_path)])
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == f"{tmp_path}/equal-1 was stopped by {number.name}; run the same command to go on\n"


def test_answers_may_hold_any_sign(tmp_path: Path) -> None:
    """Also those that end a line in Python's eyes, which a model of bytes may well say."""
    (tmp_path / ANSWERS).mkdir()
    records = [{"task": "A1T1", "exact": exact, "answer": "a\x85b\u2028"} for exact in (True, False)]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (tmp_path / ANSWERS / "step-1.jsonl").write_text(text, encoding="utf-8")
    assert answered(tmp_path)["A1T1"].tolist() == [1, 2]
