"""Run the `zl` command: `python -m zl`, and the script `zl`.

A server hears signals before anything else is loaded. Owns no state.
"""

import sys

from zl.ops.signals import Signals, Stopped


def main() -> int:
    """Run one command and return its exit status, as `zl.cli.main` says."""
    if sys.argv[1:2] != ["serve"]:
        from zl.cli import main as run

        return run()
    signals = Signals()
    signals.install()
    try:
        from zl.cli import main as run

        return run(signals=signals)
    except Stopped:
        return 0
    finally:
        signals.ignore()


if __name__ == "__main__":
    raise SystemExit(main())
