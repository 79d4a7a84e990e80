"""Starts the parts of a benchmark, each in its own process: the stub server, and cases that print one record."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.work import IN_FLIGHT

ROOT = Path(__file__).resolve().parent.parent
"""The repository: cases run from here, as modules."""
CACHE = ROOT / ".cache"
LIMIT_S = 1800.0
"""How long one case may take before it is killed."""


class CaseError(Exception):
    """A case ended without a record (its exit code and the end of what it said), or took too long."""


@contextmanager
def model_server(*options: str) -> Iterator[str]:
    """The stub server as a process of its own; yields its URL up to and including /v1. It ends with the block."""
    argv = [sys.executable, "-m", "benchmarks.model_server", "--exit-with-stdin", *options]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()
            server.wait(timeout=30)


def server_stats(url: str) -> dict[str, int]:
    """Completions since the last call, and the most that were in flight; starts counting afresh."""
    request = urllib.request.Request(url.removesuffix("/v1") + "/stats", method="POST")
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def run_case(module: str, arguments: Sequence[str], *, python: str | Path = sys.executable) -> dict[str, Any]:
    """Run `python -m module arguments` and return the record that it prints last. Raises CaseError."""
    argv = [str(python), "-m", module, *arguments]
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise CaseError(f"{' '.join(argv)} took more than {LIMIT_S:.0f} s and was killed") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr or done.stdout)[-4000:]
        raise CaseError(f"{' '.join(argv)} ended with exit code {done.returncode}:\n{said}")
    return json.loads(lines[-1])


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A folder on the repository's own disk (a temporary file system would make syncing free), removed at the end."""
    parent = CACHE / "bench-runs"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=parent) as folder:
        yield Path(folder)


def case_arguments(doc: str) -> argparse.ArgumentParser:
    """The arguments that all cases share."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--url", required=True, help="the stub server, up to and including /v1")
    parser.add_argument("-n", type=int, default=1000, help="rollouts")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT)
    return parser
