"""The toy data as a plug-in: found by the names it registers, named by its recipes, and its options are keys of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omni import plugins
from train.config.parse import read_fit_config
from train.config.run import plain_config
from train.data.sources import SOURCES

CONFIGS = Path(__file__).parents[2] / "configs"
RUN = "budget: {steps: 1}\nmodel: {preset: nano}\ndata: {sources: [{kind: spoken-digits, options: {%s}}]}\n"


def test_it_is_found_by_name_in_a_new_process_and_not_before(tmp_path: Path) -> None:
    code = (
        "import sys; from train.data.config import SourceConfig; from train.data.sources import SOURCES\n"
        "assert 'digits' not in sys.modules and list(SOURCES) == ['stored', 'stream']\n"
        "made = SourceConfig('spoken-digits', options={'reuse': 3}).made\n"
        "assert made.reuse == 3 and 'torch' not in sys.modules; print(sys.modules['digits'].__file__, *SOURCES)"
    )
    environment = {"PYTHONPATH": str(CONFIGS.parent), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.split() == [
        *(str(CONFIGS / "digits/__init__.py"), "stored", "stream", "spoken-digits", "recorded-digits")
    ], done.stderr


def test_a_run_names_it_nowhere_and_holds_all_of_its_options() -> None:
    config, _ = read_fit_config([str(CONFIGS / "nano.yaml"), "--data.sources.0.options.reuse", "4"])
    (source,) = plain_config(config)["data"]["sources"]
    assert config.plugins == () and source["options"]["reuse"] == 4 and source["options"]["peak"] == 0.5
    assert source["options"].keys() == SOURCES["spoken-digits"].__dataclass_fields__.keys()


def test_plugins_of_ones_own_stay_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `--plugin` and of a file, in a recipe and in a copy of one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_loaded", [])
    copy, mine, theirs = (tmp_path / name for name in ("copy.yaml", "by_option.py", "in_file.py"))
    for file in (mine, theirs):
        file.write_text("")
    copy.write_text((CONFIGS / "nano.yaml").read_text().replace("[./digits]", f"[./digits, {theirs}]"))
    plugins.load_plugins([str(mine)])
    assert read_fit_config([str(CONFIGS / "nano.yaml")])[0].plugins == (str(mine),)
    assert read_fit_config([str(copy)])[0].plugins == (str(mine), str(theirs))
    copy.write_text(RUN % "" + "plugins: [digits]\n")
    assert "digits" in read_fit_config([str(copy)])[0].plugins  # a module's name is of an installed package
