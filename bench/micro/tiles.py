"""Tile products by the number of live tiles, on each core: `python -m bench.micro.tiles [--seconds 5]`.

A core has few physical tiles to spare, and its hyperthreads share them (zl/gpu/native/tile.hpp). Where the sibling, on
a shared host somebody else's, uses tiles, products slow down with each live tile; the table shows which state a core
is in now. Needs g++ and AMX. State: a folder that goes with the process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zl.compiled import compiler
from zl.gpu.native.build import runs

SOURCE = Path(__file__).with_suffix(".cpp")


def build(folder: Path) -> Path:
    """Compile the loops."""
    command = compiler()
    if command is None or not runs("amx"):
        raise SystemExit("bench.micro.tiles: needs g++ and a CPU with AMX")
    program = folder / "tiles"
    subprocess.run(
        [command, "-O2", "-std=c++17", "-mavx512f", "-mamx-tile", "-mamx-bf16", str(SOURCE), "-o", str(program)],
        check=True,
    )
    return program


def measure(program: Path, cpu: int, seconds: float) -> dict[int, tuple[float, float, float]]:
    """Run on one core; give ns a product by the number of live tiles: 10th percentile, median, 90th percentile."""
    command = [str(program), str(seconds), str(cpu)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = (line.split() for line in said.splitlines())
    return {int(live): (float(low), float(mid), float(high)) for live, low, mid, high in rows}


def peak(program: Path, cpus: Iterable[int], seconds: float) -> float:
    """Run on several cores at once; give bf16 operations a second at the best number of live tiles, medians summed."""
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda cpu: measure(program, cpu, seconds), cpus)
        return sum(2 * 16 * 16 * 32 / min(mid for _, mid, _ in one.values()) * 1e9 for one in found)


def main() -> None:
    """Measure the cores one after the other and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each core")
    args = parser.parse_args()
    print("nanoseconds a product of 16 x 16 x 32, median (10th to 90th percentile)\n")
    print("| core | 4 live tiles | 5 | 7 | 8 |\n|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for cpu in sorted(os.sched_getaffinity(0)):
            found = measure(program, cpu, args.seconds)
            cells = (f" {mid:.1f} ({low:.1f} to {high:.1f}) |" for low, mid, high in found.values())
            print(f"| {cpu} |" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
