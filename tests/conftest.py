"""One thread for every test: small tensors gain nothing from more, and sums are then the same in every process.

And `--guard`: the graph guard looks on while tests train (tests/guarded.py).
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import inspect
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["OMNI_CACHE"] = tempfile.mkdtemp(prefix="omni-tests-")  # what this machine measured before is not the tests'
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in what the tests start

import torch

torch.set_num_threads(1)
atexit.register(shutil.rmtree, os.environ["OMNI_CACHE"], ignore_errors=True)

gc.disable()  # until all modules are imported, of which nothing is garbage

LOOKOUT = pytest.StashKey[Any]()
COUNTS = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--guard", action="store_true", help="watch what the tests train with the graph guard (tests/guarded.py)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "untrained(*patterns): parameters (fnmatch) that this test leaves without gradient on purpose"
    )


@pytest.fixture(scope="session")
def stand_in() -> Iterator[Any]:
    """A server on this machine that speaks S3 (`tests.stores.stand_in.StandIn`)."""
    for package in ("moto", "s3fs", "flask"):
        pytest.importorskip(package, reason=f"{package} is not installed, which `pip install -e .[dev]` brings")
    from tests.stores.stand_in import serving

    with serving() as server:
        yield server


@pytest.fixture
def bucket(stand_in: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An empty bucket (`tests.stores.stand_in.Bucket`) of a server without faults, and an empty cache; tries follow at once."""
    from tests.stores.stand_in import new_bucket

    monkeypatch.setenv("OMNI_CACHE", str(tmp_path_factory.mktemp("cache")))
    return new_bucket(stand_in, monkeypatch)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A hub without repositories (`tests.stores.hub_stand_in.HubStandIn`), a token, an empty cache; tries follow at once."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    from omni.stores import reading, tries
    from tests.stores.hub_stand_in import TOKEN, serving_hub

    with serving_hub() as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(reading, "_fetched", {})
        monkeypatch.setattr(tries, "FIRST_WAIT", 0.01)
        cache = tmp_path_factory.mktemp("hub")
        values = {"ENDPOINT": server.address, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        values["HF_TOKEN_PATH"] = str(cache / "token")
        values["HUGGINGFACE_CO_URL_TEMPLATE"] = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", values["HUGGINGFACE_CO_URL_TEMPLATE"], raising=False)
        monkeypatch.setattr(_http, "time", SimpleNamespace(time=time.time, sleep=lambda seconds: None))
        yield server


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine function."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    values = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**values), 600))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # the longest files first, so that no process works on one alone at the end
        sizes = {path: path.stat().st_size for path in {item.path for item in items}}
        items.sort(key=lambda item: (-sizes[item.path], item.path))
    alike: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            alike.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in alike.values():
        marker = cases[0].get_closest_marker("sampled")
        count = marker.args[0] if marker else 1
        kept = {round((i + 0.5) * len(cases) / count - 0.5) for i in range(count)}
        for number, item in enumerate(cases):
            if number not in kept:
                item.add_marker(pytest.mark.long)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def quick_disk() -> Iterator[Callable[[int], None]]:
    """Nothing waits for the disk; a real one is waited for in tests/checkpoint/test_tensors.py, by what is given here."""
    with pytest.MonkeyPatch.context() as patch:
        real = os.fsync
        patch.setattr("os.fsync", lambda handle: None)
        yield real


@pytest.fixture(scope="module", autouse=True)
def nothing_measured() -> Iterator[None]:
    """What one file's tests measured (`engine.measure`) is not another's."""
    yield
    for place in Path(os.environ["OMNI_CACHE"]).glob("*-*.json"):
        place.unlink(missing_ok=True)


@pytest.fixture(scope="session", autouse=True)
def quick_pictures() -> Iterator[dict[str, Any]]:
    """Pictures are one pixel each; tests of pictures draw them whole, by what is given here."""
    from matplotlib.figure import Figure
    from PIL import Image

    quick = {
        "tight_layout": lambda figure, **options: None,
        "savefig": lambda figure, file, **options: Image.new("RGB", (1, 1)).save(file, "PNG"),
    }
    with pytest.MonkeyPatch.context() as patch:
        real = {name: getattr(Figure, name) for name in quick}
        for name, function in quick.items():
            patch.setattr(Figure, name, function)
        yield real


@pytest.fixture
def whole_pictures(quick_pictures: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in quick_pictures.items():
        monkeypatch.setattr(f"matplotlib.figure.Figure.{name}", function)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be spawned is forked from a process that has done its imports."""
    from tests.processes import FORKS

    monkeypatch.setitem(multiprocessing.context._concrete_contexts, "spawn", FORKS)


@pytest.fixture
def terminal_signals() -> Iterator[None]:
    """Signals act as in a terminal, here and in what the test starts, where nohup or a shell's background has them ignored."""
    numbers = (signal.SIGHUP, signal.SIGINT)
    before = [signal.signal(n, h) for n, h in zip(numbers, (signal.SIG_DFL, signal.default_int_handler), strict=True)]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def lookout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not request.config.getoption("--guard"):
        yield
        return
    from tests.guarded import CHILDREN, Lookout, children

    place = tmp_path_factory.mktemp("guarded")
    os.environ[CHILDREN] = str(place)
    with Lookout() as looking:
        request.config.stash[LOOKOUT] = looking
        yield
    found = children(place)
    found["processes"] = found.pop("tests", 0)
    count(request.config, found)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A finding in what a test trained, its fixtures included, is that test's failure."""
    looking = item.config.stash.get(LOOKOUT, None)
    if looking is None:
        return (yield)
    looking.untrained = [pattern for mark in item.iter_markers("untrained") for pattern in mark.args]
    try:
        result = yield
    finally:
        found, counts = looking.take()
        count(item.config, counts)
    if found:
        from omni.diagnostics import report

        pytest.fail(f"the graph guard found\n{report(found)}", pytrace=False)
    return result


def count(config: pytest.Config, more: dict[str, int]) -> None:
    """Add to what the guard has looked at."""
    counts = config.stash.setdefault(COUNTS, {})
    for name, number in more.items():
        counts[name] = counts.get(name, 0) + number


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of pytest-xdist's processes
        session.config.workeroutput["guard"] = session.config.stash.get(COUNTS, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    count(node.config, getattr(node, "workeroutput", {}).get("guard", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How much was looked at: no finding is no news where nothing was watched."""
    if config.getoption("--guard"):
        named = ("tests", "processes", "steps", "windows", "updates", "findings")
        counts = {**dict.fromkeys(named, 0), **config.stash.get(COUNTS, {})}
        terminalreporter.write_line(
            f"graph guard: {counts['steps']} steps of the loop, {counts['windows']} forward and backward passes and "
            f"{counts['updates']} updates of optimizers watched in {counts['tests']} tests and {counts['processes']} processes "
            f"that they started; {counts['findings']} findings"
        )
