"""`zl build`: make an artifact of a model, with a progress bar and the time of each phase. Owns no state."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from zl.config import POLICY, load, spec_of
from zl.pull import locate

HELP = "build a model for this machine, for a quick start"
DESCRIPTION = """\
Make an artifact of a model: its weights packed for this CPU, the compiled program, the tokenizer, and a manifest that
hashes all of it. `zl serve` then starts from the artifact within seconds. Without --out it goes to the cache
($XDG_CACHE_HOME/zl/builds), where `zl serve --model MODEL` finds it by itself.

An interrupted build goes on where it ended. An artifact holds native code: serve only those that you trust.
"""
EPILOG = """\
examples:
  zl build
  zl build ./my-model.gguf --out ./my-artifact && zl serve --model ./my-artifact
  zl build --dtype float32 --cpu-level avx2 --out ./portable
"""

SHAPING = ("dtype", "kv", "penalty_filter", "cpu_level", "max_model_len", "max_tokens", "default_tokens",
           "system_tokens", "context_tokens", *POLICY)  # fmt: skip
"""Settings that decide what is built."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the folder, and the settings that decide what is built."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="GGUF file, Hugging Face folder, or a known name")
    parser.add_argument("--out", metavar="DIR", help="folder for the artifact (default: the cache)")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for name in SHAPING:
        spec = spec_of(name)
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=f"set_{name}", metavar=spec.metavar, help=spec.help.replace("%", "%%"))


def run(args: argparse.Namespace) -> int:
    """Build, then print the artifact's folder on stdout and its phases on stderr."""
    flags = {name: getattr(args, f"set_{name}", None) for name in SHAPING} | {"model": args.model}
    settings = load(flags, file=args.config)
    from zl.artifact import is_artifact
    from zl.builder import Builder, level_for
    from zl.cli.pull import ProgressBar, fetch_shown
    from zl.errors import ConfigError
    from zl.phases import Phases

    path = locate(settings.model) or fetch_shown(settings.model)
    if is_artifact(path):
        raise ConfigError(f"{path} is an artifact already: serve it, or name the model that it was made from")
    level = level_for(settings, "cuda" if settings.device == "cuda" else "cpu")
    phases, begun = Phases(), time.monotonic()
    bar = ProgressBar(sys.stderr)
    try:
        made = Builder(path, settings, level, phases, bar).build(Path(args.out) if args.out else None)
    finally:
        bar.close()
    for line in phases.lines("total", time.monotonic() - begun):
        print(line, file=sys.stderr)
    size = sum(entry.bytes for entry in made.files.values())
    print(f"build {made.build_id[:16]}: {made.model.name}, {made.facts['dtype']}, {level}, {size / 1e6:.0f} MB",
          file=sys.stderr)  # fmt: skip
    print(made.folder)
    return 0
