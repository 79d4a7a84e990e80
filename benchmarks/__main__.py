"""Runs every benchmark of the spine, one after the other: `make bench`."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.cases import ROOT

BENCHMARKS = ("benchmarks.single_turn", "benchmarks.scale", "benchmarks.hosts_case", "benchmarks.resume_case")


def main() -> int:
    """The number of benchmarks that failed."""
    failed = 0
    for module in BENCHMARKS:
        print(f"\n== {module} ==", flush=True)
        failed += bool(subprocess.run([sys.executable, "-m", module], cwd=ROOT, check=False).returncode)
    return failed


if __name__ == "__main__":
    sys.exit(main())
