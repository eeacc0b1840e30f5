"""Registries of objects by name, and plug-ins: modules of the user's own that add to them.

    @register_codec("mine", sample_rate=16000, ...)      # in my_package/my_module.py
    omni-train fit nano --plugin my_package.my_module    # or `plugins: [my_package.my_module]` in the configuration

A module that is not installed may also be named by its file or folder: `./mine.py`, in a configuration seen from its file.
A plug-in is imported because the user named it: nothing that is stored (model folders, checkpoints, prepared rows) names one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from omni.errors import UserError, closest

T = TypeVar("T")

PLUGIN = "a plug-in's: name its module with --plugin"
"""Hint of messages about a name that is not registered."""

_loaded: list[str] = []


class Registry(dict[str, T]):
    """Entries of one kind, by name, in the order of registration.

    Args:
        noun: for an entry in messages, such as `codec`.
    """

    def __init__(self, noun: str) -> None:
        super().__init__()
        self.noun = noun
        self._sources: dict[str, str] = {}

    def add(self, name: str, entry: T) -> None:
        """Adds an entry; one that the same module (or a notebook) has added before is replaced.

        Raises:
            UserError: the name is taken by Omni or by another module.
        """
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name != "<module>":
            frame = frame.f_back
        source = str(frame.f_globals.get("__name__", ""))  # the module whose import, or whose cell in a notebook, is running
        owner = self._sources.get(name, source)
        if name in self and owner != source:
            # Omni's own may come after a plug-in's.
            first, other = (source, owner) if source.startswith(("omni.", "train.")) else (owner, source)
            raise UserError(f"{self.noun} {name!r} is registered twice, first by {first}: give the one of {other} another name")
        self[name], self._sources[name] = entry, source

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that adds what it decorates."""
        if not isinstance(name, str):
            raise UserError(f'{self.noun} {name!r:.80}: give the decorator a name, as in @register("mine")')

        def add(entry: T) -> T:
            self.add(name, entry)
            return entry

        return add

    def find(self, name: str, where: str = "") -> T:
        """The entry of that name.

        Raises:
            UserError: there is none; the closest name is given, after the key or option `where` it came from.
        """
        if name not in self:
            raise UserError(f"{where}{where and ': '}{self.noun} {name!r} is unknown; {closest(name, self)} ({PLUGIN})")
        return self[name]


@contextlib.contextmanager
def named(subject: str) -> Iterator[None]:
    """A context in which a failure of somebody's code is a UserError that names it; those of memory, files and PyTorch pass."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            raise
        text = " ".join(str(error).split()) or "no message"
        raise UserError(f"{subject} failed with {type(error).__name__}: {text}") from error


def load_plugins(names: Sequence[str], where: str = "--plugin", folder: str | Path = "") -> list[str]:
    """Imports plug-ins, from the installed packages or the present folder; those that are loaded already are left alone.

    Args:
        folder: where paths (`./mine.py`) start.

    Returns:
        Their names, by which any process finds them: paths are absolute.

    Raises:
        UserError: a name is of no module, or the module cannot be imported (its file and line are named).
    """
    names = [str(Path(folder, name).resolve()) if _is_path(name) else name for name in names]
    for name in names:
        if not _is_path(name) and (name.endswith(".py") or "/" in name):
            raise UserError(f"{where} {name!r} is not the name of a module: write a file as ./{name}, a module with dots")
        if name not in _loaded:
            _load(name, where)
            _loaded.append(name)
    return names


def loaded() -> tuple[str, ...]:
    """Names of the plug-ins of this process, for a process that it starts."""
    return tuple(_loaded)


def take_plugins(words: Sequence[str]) -> list[str]:
    """Loads the plug-ins that a command line names by `--plugin NAME` (any number of times); returns the other words.

    Raises:
        UserError: as of `load_plugins`, or the name is missing.
    """
    names, rest, remaining = [], [], iter(words)
    for word in remaining:
        option, equals, value = word.partition("=")
        if option != "--plugin":
            rest += [word, *remaining] if word == "--" else [word]
            continue
        name = value if equals else next(remaining, "")
        if not name or name.startswith("-"):
            raise UserError("--plugin has no value: give the name of a module, such as my_package.my_module")
        names.append(name)
    load_plugins(names)
    return rest


def _is_path(name: str) -> bool:
    """Whether a plug-in is named by its file or folder."""
    return name.startswith(("./", "../", "/"))


def _load(name: str, where: str) -> None:
    here, ours = os.getcwd(), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    module = name
    if _is_path(name):
        here, module = os.path.dirname(name), Path(name).stem
    if here not in sys.path and ("" not in sys.path or module != name):
        # It stays there: the module may import others later, also in other processes. Those find the package first, whatever
        # lies in the folder.
        sys.path += [*([] if ours in sys.path else [ours]), here]
    importlib.invalidate_caches()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what it prints must not come into an answer
            imported = importlib.import_module(module)
        if module != name and name not in _paths_of(imported):
            raise UserError(f"there is another module {module}, {_paths_of(imported)[0]}: give one of them another name")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UserError(_broken(name, where, error)) from error
        raise UserError(
            f"{where} {name}: there is no module {error.name}, neither in {here} nor among the installed packages"
        ) from error
    except UserError as error:
        raise UserError(f"{where} {name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(_broken(name, where, error)) from error


def _paths_of(module: ModuleType) -> list[str]:
    """The file of a module, and its folder where it is a package."""
    file = Path(module.__file__ or str(module)).resolve()
    return [str(file), str(file.parent)] if file.stem == "__init__" else [str(file)]


def _broken(name: str, where: str, error: BaseException) -> str:
    """One line about a module that cannot be imported, with the place in the user's file."""
    if isinstance(error, SyntaxError) and error.filename:
        location = f"{error.filename}, line {error.lineno}"
    else:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        ours = tuple(os.path.join(package, name, "") for name in ("omni", "train", "infer"))
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if "importlib" not in f.filename and not f.filename.startswith(ours)]
        location = f"{theirs[-1].filename}, line {theirs[-1].lineno}" if theirs else "its import"
    text = " ".join(str(error).split()) or "no message"
    return f"{where} {name} cannot be imported: {location}: {type(error).__name__}: {text}"
