"""Plug-ins: registries refuse a name twice, and a module that is missing or broken is one line that says where."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni import plugins
from omni.codec.base import AudioCodec, CodecStream
from omni.errors import UserError
from omni.layout import SPECIALS, Layout
from omni.plugins import Registry, load_plugins, take_plugins
from omni.tasks import TASKS, Task, Turn, example, find_writer, prompt, register_task


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that is the present one; modules, registrations and the path are as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_loaded", [])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import no_such_package_of_anybody", ["one", "no_such_package_of_anybody", "line 1"]),
        ("x = 1\ndef f(:\n", ["one", "one.py, line 2", "SyntaxError"]),
        ("import sys\nsys.exit(3)", ["one", "one.py, line 2", "SystemExit"]),
        ("from train import register_voice as r\n@r\ndef say(text): ...",
         ["one: ", "voice <function say", "give the decorator a name"]),
        ("from train import *\n@register_callback('a')\nclass A(Callback):\n def on_setp(self, step, figures): ...",
         ["one: ", "callback a: on_setp is never called", "on_step"]),
        ("from omni.codec.registry import register_codec as r\n@r('snac', sample_rate=1, frame_rate=1, codebook_sizes=(2,))\n"
         "def f(a, b): ...", ["one", "'snac'", "twice", "omni.codec.registry"]),
        ("from omni.tasks import *\nregister_task(Task('A1T9', 'audio', True, False, 'new'))", ["A1T9", "'new'", "offset"]),
    ],
)  # fmt: skip
def test_a_broken_module_is_one_line_with_its_place(folder: Path, text: str, named: list[str]) -> None:
    write(folder, "one", text)
    with pytest.raises(UserError) as caught:
        load_plugins(["one"])
    assert all(part in str(caught.value) for part in named) and "\n" not in str(caught.value)
    assert plugins.loaded() == ()


@pytest.mark.parametrize(("name", "said"), [("absent", "no module absent"), ("one.py", "'one.py'.*as ./one.py")])
def test_a_name_that_is_none_is_refused(folder: Path, name: str, said: str) -> None:
    write(folder, "one", "")
    with pytest.raises(UserError, match=said):
        load_plugins([name])


def test_a_new_process_finds_the_package_before_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is found by a finder that comes after the path, as an editable installation is."""
    ours = str(Path(plugins.__file__).parents[1])
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", ours)])
    write(folder, "one", "")
    load_plugins(["one"])
    assert sys.path.index(ours) < sys.path.index(str(folder))


def test_a_path_names_a_file_or_a_package_from_the_folder_of_who_names_it(folder: Path) -> None:
    (folder / "far/pack").mkdir(parents=True)
    write(folder / "far", "single", "from pack import inner")
    write(folder / "far/pack", "__init__", "from . import inner")
    write(folder / "far/pack", "inner", "")
    names = load_plugins(["./single.py", "./pack"], folder=folder / "far")
    assert names == [str(folder / "far/single.py"), str(folder / "far/pack")] == list(plugins.loaded())
    assert load_plugins(["./far/pack"]) == names[1:] and sys.modules["pack"].__path__ == names[1:]
    write(folder, "single", "")
    with pytest.raises(UserError, match=r"another module single, .*/far/single.py: give one of them another name"):
        load_plugins(["./single.py"])
    with pytest.raises(UserError, match=r"absent.py: there is no module absent, neither in .*/far"):
        load_plugins(["./far/absent.py"])


def test_a_name_of_two_plugins_is_refused_and_one_module_may_register_again(folder: Path) -> None:
    toys: Registry[int] = Registry("toy")
    sys.modules["toys"] = type(sys)("toys")
    sys.modules["toys"].toys = toys  # type: ignore[attr-defined]
    write(folder, "one", "from toys import toys\ntoys.add('a', 1)\ntoys.add('a', 2)")
    write(folder, "two", "from toys import toys\ntoys.register('a')(3)")
    load_plugins(["one"])
    load_plugins(["one"])
    assert toys == {"a": 2} and toys.find("a") == 2 and plugins.loaded() == ("one",)
    with pytest.raises(UserError, match=r"two: toy 'a' .*by one"):
        load_plugins(["one", "two"])
    with pytest.raises(UserError, match=r"key: toy 'aa' is unknown; did you mean 'a'.*--plugin"):
        toys.find("aa", "key")


def test_options_are_taken_from_a_command_line(folder: Path) -> None:
    write(folder, "one", "")
    write(folder, "two", "")
    rest = take_plugins(["fit", "--plugin", "one", "nano", "--plugin=two", "--seed", "1", "--", "--plugin", "three"])
    assert rest == ["fit", "nano", "--seed", "1", "--", "--plugin", "three"] and plugins.loaded() == ("one", "two")
    for words in (["--plugin"], ["--plugin", "--seed"], ["--plugin="]):
        with pytest.raises(UserError, match="--plugin has no value"):
            take_plugins(words)


def test_a_task_with_a_marker_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt ends with the new id on text and the usual one on audio; others are as before."""
    monkeypatch.setitem(SPECIALS, "text", dict(SPECIALS["text"]))
    for name in ("A1T7", "A1A7"):
        monkeypatch.setitem(TASKS, name, None)
    layout = Layout.preset("codec2")
    usual = prompt(layout, Turn("A1A2", features=2)).tokens
    written = register_task(Task("A1T7", "audio", text=True, audio=False, marker="translate"), offset=6)
    spoken = register_task(Task("A1A7", "audio", text=True, audio=True, marker="translate"))
    tokens = prompt(layout, Turn("A1A7", features=2)).tokens
    assert (tokens[:, :-1] == usual[:, :-1]).all() and (tokens[:-1, -1] == usual[:-1, -1]).all()
    assert tokens[-1, -1] == layout.text.size + 6
    assert find_writer(spoken) is written and find_writer(TASKS["A1A2"]) is TASKS["A1T2"]
    assert len(example(layout, [Turn("A1T7", features=2, text=[1, 2])])) == 2 + 3 + 3
    with pytest.raises(UserError, match=r"'other'.*'translate'"):
        register_task(Task("A1T6", "audio", text=True, audio=False, marker="other"), offset=6)
    with pytest.raises(UserError, match=r"'far'.*8"):
        register_task(Task("A1T7", "audio", text=True, audio=False, marker="far"), offset=9)
        prompt(layout, Turn("A1T7", features=2))


class Silence(AudioCodec):
    name, sample_rate, frame_samples, codebook_sizes = "silence", 100, 10, (4, 4)

    def _encode(self, audio: Tensor) -> Tensor:
        return torch.zeros(2, self.frames(len(audio)) - 1, dtype=torch.long)

    def stream(self, seed: int = 0) -> CodecStream:
        return Short(self)


class Short(CodecStream):
    def _push(self, codes: Tensor) -> Tensor:
        return torch.zeros(9 * codes.shape[1])

    def _finish(self) -> Tensor:
        return self._nothing()


def test_codes_and_sound_of_a_wrong_length_are_named() -> None:
    with pytest.raises(UserError, match=r"silence made codes \[2, 1\] of 20 samples; .*\[2, 2\]"):
        Silence().encode(torch.zeros(20))
    with pytest.raises(UserError, match="silence made 27 samples of 3 frames; .* 30"):
        Silence().decode(torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize(
    ("method", "made", "said"),
    [("_encode", None, "silence made codes.*NoneType"), ("_encode", KeyError("x"), "silence failed with KeyError"),
     ("_push", None, "silence failed with TypeError")],
)  # fmt: skip
def test_a_codec_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, method: str, made: Any, said: str) -> None:
    def broken(self: Any, given: Tensor) -> Any:
        if made is not None:
            raise made
        return made

    monkeypatch.setattr(Short if method == "_push" else Silence, method, broken)
    with pytest.raises(UserError, match=said):
        codes = torch.zeros(2, 3, dtype=torch.long)
        Silence().encode(torch.zeros(20)) if method == "_encode" else Silence().stream().push(codes)


def test_what_a_module_prints_does_not_come_into_the_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "one", "print('hello')")
    load_plugins(["one"])
    assert capsys.readouterr() == ("", "hello\n")
