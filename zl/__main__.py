"""Run the `zl` command as `python -m zl`."""

from zl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
