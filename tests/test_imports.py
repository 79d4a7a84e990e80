"""Imports go down only: floors as DESIGN draws them, no cycles, and a package that costs nothing to import.

One test: .venv/bin/pytest tests/test_imports.py -k floors
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE, BINDING = "rollout_engine", "actors"

FLOORS = [
    # The glossary, failures, and what knows nothing of ours.
    "version types errors disk heldfolder threads chunks loopthread waiting hooks bucket",
    # What a user writes, what crosses the wire, what is stored, and pure decisions about it.
    "config specs schema exchange hostplan plugins problems toml options modelflags machine events stream hostclock "
    "watch metrics vitals pulse prometheus loglines logfile logs rolloutline status",
    "scheduler tries depthfirst backoff suspects breaker circuits leases lending knob latency taken aimd budgets "
    "spending progress link permits agentclock estimate gatedcall placement fitness recoveries outbox estimators "
    "intervals scores groups summaries rewards picture",
    # Contracts and their implementations.
    "sandboxes models formats agents verifiers proxy harnesses metered",
    # Rollouts, hosts, plan, tasks, store.
    "staticcheck bound rollout phases verification teardown services prepare resources probe evaluation dryrun host "
    "held bodies hostmeter hosttraces plan tasks taskfile taskplace taskcheck qa qafilter store results abandoned "
    "submission committer commits clusters runstore gate",
    "monitor board intake planning pacing serving fleet dump ticking driver openrun carrying configcheck",
    "engine",
    "trainers",
    "cli commands __main__",
]
"""Lowest first, by the first part of a module's name under rollout_engine. Rooms of one floor may use each other."""


def modules() -> dict[str, Path]:
    found = {}
    for package in (CORE, BINDING):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imported(node: ast.AST) -> Iterator[str]:
    """The modules that one statement names: ours as precisely as they are known, others as written."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.level:  # only code that is sent into sandboxes has no name of its own to import by
            return
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in MODULES else str(node.module)


def at_module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What is executed when the module is imported; imports for type checking alone are not."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from at_module_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [each for handler in node.handlers for each in handler.body]
            yield from at_module_level([*node.body, *handlers, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.With | ast.ClassDef):
            yield from at_module_level(node.body)


def module_imports(name: str) -> set[str]:
    return {found for node in at_module_level(TREES[name].body) for found in imported(node)}


def all_imports(name: str) -> set[str]:
    """Those within functions too."""
    return {found for node in ast.walk(TREES[name]) for found in imported(node)}


GRAPH = {name: {found for found in module_imports(name) if found in MODULES} for name in MODULES}


def floor(name: str) -> int:
    room = name.split(".")[1]
    floors = [number for number, rooms in enumerate(FLOORS) if room in rooms.split()]
    assert len(floors) == 1, f"{name} stands on no floor: give {room!r} one in tests/test_imports.py and in DESIGN"
    return floors[0]


def core_modules() -> list[str]:
    return [name for name in MODULES if name.startswith(f"{CORE}.")]


def test_floors_are_imported_from_above_only() -> None:
    upward = [
        f"{name} (floor {floor(name)}) imports {found} (floor {floor(found)})"
        for name in core_modules()
        for found in GRAPH[name]
        if found.startswith(f"{CORE}.") and floor(found) > floor(name)
    ]
    assert upward == []


def test_no_function_imports_upward_either() -> None:
    upward = [
        f"{name} imports {found}"
        for name in core_modules()
        for found in all_imports(name)
        if found in MODULES and found.startswith(f"{CORE}.") and floor(found) > floor(name)
    ]
    assert upward == []


def test_there_is_no_cycle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for found in GRAPH[name]:
                visit(found, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_the_core_knows_nothing_of_ray() -> None:
    """The driver reaches the binding by its entry point; the command line may ask what Ray says of itself."""
    for name in core_modules():
        reached = {found.split(".")[0] for found in all_imports(name)}
        assert BINDING not in reached, name
        if not name.startswith(f"{CORE}.commands"):
            assert "ray" not in reached, name


def test_the_floors_name_only_rooms_that_are_there_or_planned() -> None:
    planned = {"harnesses", "gate", "trainers"}
    there = {name.split(".")[1] for name in core_modules()}
    assert {room for rooms in FLOORS for room in rooms.split()} - planned <= there


def loaded_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has after a statement."""
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


HEAVY = {"ray", "docker", "httpx", "aiohttp", "pydantic", "pyarrow", "numpy", "uvloop", "yaml"}


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import rollout_engine; rollout_engine.__version__", HEAVY | {"rich", "typer"}),
        ("import rollout_engine.cli", HEAVY | {"rich"}),
        ("from rollout_engine import RolloutEngine, Task, ModelSpec", {"ray", "docker", "httpx", "aiohttp", "rich"}),
        ("import rollout_engine.host, rollout_engine.driver", {"ray", "docker", "httpx", "aiohttp", "rich", "typer"}),
    ],
)
def test_an_import_loads_no_more_than_it_needs(statement: str, unwanted: set[str]) -> None:
    loaded = loaded_by(statement)
    assert "rollout_engine" in loaded
    assert loaded & unwanted == set()
