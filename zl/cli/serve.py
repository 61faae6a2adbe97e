"""`zl serve`: settings from file, environment and flags, then the server, until a signal ends it. Owns no state."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from typing import Any

from zl.config import SETTINGS, Settings, load, spec_of
from zl.ops.notify import Notifier
from zl.ops.signals import Signals, Stopped
from zl.pull import locate

HELP = "serve a model"
DESCRIPTION = """\
Serve a model on TCP and Unix sockets until SIGINT or SIGTERM. A model name that is not in the cache yet is fetched.

Every setting has one name: --max-rows here is ZL_MAX_ROWS in the environment and max_rows in the file given with
--config. A flag wins over the environment, the environment over the file. docs/configuration.md lists them all.
"""
EPILOG = """\
examples:
  zl serve
  zl serve --model ./my-model.gguf --listen tcp:0.0.0.0:7433 --listen unix:/run/zl.sock --metrics off
  zl serve --config zl.toml --max-rows 32 --kv-memory 2GiB
"""

log = logging.getLogger("zl")

FETCH_S = 120.0
"""How much longer the service manager is to wait after each sign of progress of a fetch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and one flag for each setting that has one."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for setting in SETTINGS:
        spec = spec_of(setting.name)
        if not spec.flag:
            continue
        shown = setting.default if setting.default is not dataclasses.MISSING else "TCP port 7433 and a Unix socket"
        default = f" (default: {shown})" if shown not in ("", 0) else ""
        bare: dict[str, Any] = {"nargs": "?", "const": spec.bare} if spec.bare else {}
        parser.add_argument(
            "--" + setting.name.replace("_", "-"),
            dest=f"set_{setting.name}",
            metavar=spec.metavar,
            action="append" if spec.many else "store",
            help=(spec.help + default).replace("%", "%%"),
            **bare,
        )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the status is the server's."""
    if args.signals is not None:
        return _run(args, args.signals)
    signals = Signals()
    signals.install()
    try:
        return _run(args, signals)
    finally:
        signals.restore()


def _run(args: argparse.Namespace, signals: Signals) -> int:
    flags = {setting.name: getattr(args, f"set_{setting.name}", None) for setting in SETTINGS}

    def read() -> Settings:
        return load(flags, file=args.config)

    settings = read()
    notifier = Notifier(os.environ, os.getpid())
    try:
        from zl.process import run as serve  # before a model is fetched: where a package is missing, that is no use

        path = locate(settings.model)
        if path is None:
            from zl.cli.pull import fetch_shown

            path = fetch_shown(settings.model, lambda text: notifier.status(text, extend_s=FETCH_S))
        return serve(settings, path, notifier, read, signals)
    except Stopped:
        signals.ignore()
        log.info("told to stop while starting")
        notifier.stopping("told to stop while starting")
        return 0
