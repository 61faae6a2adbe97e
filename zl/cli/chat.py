"""`zl chat`: a conversation. Ctrl-C ends an answer, Ctrl-D the chat. State: the turns so far, in `Chat`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, TextIO

from zl.cli.connecting import add_connection, add_sampling, connect, options
from zl.errors import ConfigError, ZlError
from zl.shapes import MAX_MESSAGES
from zl.streams import standard_input

if TYPE_CHECKING:
    from zl.client import Client

HELP = "hold a conversation"
DESCRIPTION = """\
Hold a conversation with a running server.

  Ctrl-C   ends the answer that is being given; the chat goes on
  Ctrl-D   leaves
  /new     starts over      /help   says this
"""
EPILOG = """\
examples:
  zl chat
  zl chat --system "You are a patient teacher." --temperature 0.3
"""
_PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_connection(parser)
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    live = standard_input().isatty()
    if live:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (line editing and history for input())
    with contextlib.closing(Chat(args, sys.stdout, sys.stderr)) as chat:
        chat.connect()
        if live:
            print("Ctrl-C ends an answer, Ctrl-D leaves, /help says more.", file=sys.stderr)
        while True:
            try:
                line = input(_PROMPT if live else "").strip()
            except EOFError:
                if live:
                    print()
                return 0
            except KeyboardInterrupt:
                print("\nCtrl-D leaves.", file=sys.stderr)
                continue
            chat.take(line)


class Chat:
    """The turns so far, and the connection they are sent over."""

    def __init__(self, args: argparse.Namespace, out: TextIO, notes: TextIO):
        self._args = args
        self._out = out
        self._notes = notes
        self._client: Client | None = None
        self.turns: list[str] = []

    def connect(self) -> None:
        """Connect if there is no connection."""
        if self._client is None:
            self._client = connect(self._args)

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def take(self, line: str) -> None:
        """Take one line of the user: a command, or a turn to answer. What goes wrong is told, and the chat goes on."""
        if line == "/new":
            self.turns.clear()
            self._note("starting over")
        elif line == "/help":
            self._note("Ctrl-C ends an answer, Ctrl-D leaves, /new starts over")
        elif line.startswith("/") and " " not in line:
            self._note(f"{line} is no command: there are /new and /help")
        elif line:
            try:
                self._answer(line)
            except ConfigError:
                raise
            except ZlError as error:
                self._note(f"zl: {error}")
                if isinstance(error, ConnectionError):
                    self.close()  # the next turn tries again

    def _answer(self, line: str) -> None:
        # The wire takes 16 turns: the oldest pairs go, so that the conversation still begins with the user.
        while len(self.turns) + 1 > MAX_MESSAGES:
            del self.turns[:2]
            self._note("the chat is long: its oldest turns are left out from here on")
        self.connect()
        assert self._client is not None
        said: list[str] = []
        stream = self._client.stream([*self.turns, line], **options(self._args))
        try:
            with stream:
                for chunk in stream:
                    said.append(chunk.text)
                    self._out.write(chunk.text)
                    self._out.flush()
        except KeyboardInterrupt:
            self._note(" [stopped]")
        else:
            print(file=self._out, flush=True)
        # What was said before Ctrl-C stays said; a turn that got no word is forgotten.
        if text := "".join(said):
            self.turns += [line, text]

    def _note(self, text: str) -> None:
        self._out.flush()
        print(text, file=self._notes, flush=True)
