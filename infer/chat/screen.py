"""What a chat shows: the conversation, and under it one line that says what happens at present.

On a terminal the answer grows as a caption above that line. Elsewhere the conversation goes to standard output, and a line of
standard error tells each change of what happens.
"""

from __future__ import annotations

import sys
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from infer.messages import on_one_line

Doing = Literal["listening", "hearing you", "thinking", "speaking", "waiting", "loading the model", "warming up"]

STYLES: dict[str, str] = {"listening": "green", "hearing you": "bold red", "thinking": "yellow", "speaking": "bold cyan"}


class ChatScreen:
    """A context manager; the terminal is as before afterwards.

    Attributes:
        caption: the present answer, as far as it is shown.
    """

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._terminal else None
        self._doing, self._detail = "", ""
        self._held: list[Text] = []  # lines that wait for the end of the caption
        self.caption = ""

    def __enter__(self) -> ChatScreen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.caption:
            self.answered("(not finished)")
        if self._live is not None:
            self._live.update(Text(""))
            self._live.stop()

    def doing(self, what: Doing, detail: str = "") -> None:
        """Tell what happens at present; `detail` is told on a terminal alone."""
        if (what, detail) == (self._doing, self._detail):
            return
        changed, self._doing, self._detail = what != self._doing, what, detail
        if self._live is not None:
            self._refresh()
        elif changed:
            print(f"[{what}]", file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        """Show the next piece of the answer."""
        if self._live is None:
            print(text if self.caption else f"model: {text}", end="", flush=True)
        self.caption += text
        self._refresh()

    def answered(self, note: str = "") -> None:
        """The answer is over."""
        text, self.caption = self.caption, ""
        if self._live is not None:
            self._refresh()  # before, without the caption
            self._console.print(Text.assemble(("model: ", "bold cyan"), text, (f"  {note}" if note else "", "dim")))
        else:
            print(f"{'' if text else 'model:'}{f' {note}' if note else ''}", flush=True)
        held, self._held = self._held, []
        for line in held:
            self._line(line)

    def you(self, text: str) -> None:
        """Show what was heard."""
        self._line(Text.assemble(("you: ", "bold green"), on_one_line(text)))

    def line(self, text: str) -> None:
        """Show a line."""
        self._line(Text(text, "dim"))

    def _line(self, text: Text) -> None:
        """Show a line; outside of a terminal, once the answer under way is over."""
        if self._live is not None:
            self._console.print(text)
        elif self.caption:
            self._held.append(text)
        else:
            print(text.plain, flush=True)

    def tell(self, text: str) -> None:
        """Print a warning, an error or a hint, which go to standard error where there is no terminal."""
        if self._live is not None:
            self._console.print(Text(text, "yellow"))
        else:
            print(text, file=sys.stderr, flush=True)

    def _refresh(self) -> None:
        if self._live is None:
            return
        status = Text.assemble(("● ", STYLES.get(self._doing, "")), self._doing, (f"  {self._detail}", "dim"))
        status.no_wrap, status.overflow = True, "ellipsis"
        caption = [Text.assemble(("model: ", "bold cyan"), self.caption)] if self.caption else []
        self._live.update(Group(*caption, status), refresh=True)
