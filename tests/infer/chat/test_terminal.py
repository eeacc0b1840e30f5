"""The terminal of a chat: keys, Ctrl-C, the line that says what happens, and how it is left behind."""

from __future__ import annotations

import os
import pty
import queue
import signal
import sys
import termios
from typing import Any

import pytest

from infer.chat.terminal import TWICE, ChatScreen, interruptions, keys


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pseudo-terminal as standard input; the end that types."""
    typing, number = pty.openpty()
    with open(number, closefd=False) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield typing, number
    os.close(typing)
    os.close(number)


def test_enter_and_the_end_are_delivered_and_the_terminal_is_as_before(terminal: Any) -> None:
    typing, number = terminal
    before, came = termios.tcgetattr(number), queue.SimpleQueue[str]()
    with keys(came.put):
        assert not termios.tcgetattr(number)[3] & termios.ECHO
        os.write(typing, b"abc\n\n")
        assert came.get(timeout=5) == came.get(timeout=5) == "enter"
        os.write(typing, b"\x04")
        assert came.get(timeout=5) == "end"
    assert termios.tcgetattr(number) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_the_terminal_is_restored_whatever_happens(terminal: Any, error: type[BaseException]) -> None:
    _, number = terminal
    before = termios.tcgetattr(number)
    with pytest.raises(error), keys(lambda key: None):
        raise error
    assert termios.tcgetattr(number) == before


def test_a_pipe_counts_only_where_keys_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for piped in (False, True):
        reading, writing = os.pipe()
        os.write(writing, b"\n")
        os.close(writing)
        came = queue.SimpleQueue[str]()
        with open(reading) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            with keys(came.put, piped):
                if piped:
                    assert [came.get(timeout=5), came.get(timeout=5)] == ["enter", "end"]
        assert came.empty()


def test_a_second_ctrl_c_leaves_only_where_it_follows_soon() -> None:
    now, came = 100.0, list[str]()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    with pytest.raises(KeyboardInterrupt), interruptions(came.append, lambda: now):
        signal.raise_signal(signal.SIGINT)
        now += TWICE
        signal.raise_signal(signal.SIGINT)
        assert came == ["interrupt", "interrupt"]
        now += TWICE - 0.1
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_of_a_terminal_lines_are_whole_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    with ChatScreen() as screen:
        for _ in range(3):
            screen.doing("listening", "now")
        screen.doing("speaking", "0.1 s")
        screen.show("five ")
        screen.you("two plus\nthree")
        screen.doing("speaking", "0.2 s")
        screen.show("and")
        screen.answered("(0.4 s)")
        screen.show("left")
    out, err = capsys.readouterr()
    assert out == "model: five and (0.4 s)\nyou: two plus\\nthree\nmodel: left (not finished)\n"
    assert err == "[listening]\n[speaking]\n"
