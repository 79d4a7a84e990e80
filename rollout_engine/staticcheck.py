"""What can be said against verifier code without running it. Pure: source in, reasons out.

A generated task whose verifier fails this check is not worth a rollout. The check catches mistakes and shortcuts of
whoever wrote the code; it is no defence, which is the sandbox's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from rollout_engine.errors import InputError
from rollout_engine.specs import Task
from rollout_engine.verifiers.code.source import Function, Source, input_names, parse

MIN_NODES, MAX_NODES = 5, 700

BLOCKED_IMPORTS = frozenset({
    "ctypes", "gc", "importlib", "inspect", "multiprocessing", "os", "pickle", "pty", "resource", "shutil",
    "signal", "site", "socket", "ssl", "subprocess", "sys", "threading", "urllib", "http", "requests", "httpx",
    "aiohttp",
})  # fmt: skip
"""Code that needs one of these reaches past `env`."""
BLOCKED_NAMES = frozenset({
    "__builtins__", "__import__", "breakpoint", "compile", "delattr", "eval", "exec", "exit", "globals", "input",
    "locals", "quit", "setattr", "vars",
})  # fmt: skip
_EVIDENCE = ("env", "final_answer", "conversation")


@dataclass(frozen=True, slots=True)
class StaticLimits:
    """What the check allows; the defaults are those of the reference system's gate."""

    min_nodes: int = MIN_NODES
    max_nodes: int = MAX_NODES
    blocked_imports: frozenset[str] = BLOCKED_IMPORTS
    blocked_names: frozenset[str] = BLOCKED_NAMES


def static_reasons(task: Task) -> tuple[str, ...]:
    """What speaks against a task's verifier as it stands; nothing is said of verifiers without code."""
    verifier = task.verifier or {}
    code = verifier.get("code")
    return tuple(check_code(code)) if verifier.get("type") == "code" and isinstance(code, str) else ()


def check_code(code: str, limits: StaticLimits | None = None) -> list[str]:
    """Every reason against the code, each a plain sentence; none: it may be tried out."""
    try:
        source = parse(code)
    except InputError as error:
        return [error.message]
    limits = limits or StaticLimits()
    return [
        *_signature(source.function),
        *_size(source, limits),
        *_imports(source.tree, limits),
        *_names(source.tree, limits),
        *_inputs(source),
        *_constant(source.function),
    ]


def _signature(function: Function) -> Iterator[str]:
    """The inputs must be enough to call it, and it must be a function that answers."""
    given = set(input_names(function).values())
    arguments = function.args
    required = arguments.posonlyargs + arguments.args
    required = required[: len(required) - len(arguments.defaults)]
    required += [item for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default]
    missing = [item.arg for item in required if item.arg not in given]
    if missing:
        yield f"{function.name} needs {', '.join(missing)}, which no verifier gets (env, final_answer, conversation)"
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function)):
        yield f"{function.name} is a generator: it returns no score"


def _size(source: Source, limits: StaticLimits) -> Iterator[str]:
    nodes = sum(1 for _ in ast.walk(source.tree))
    if not limits.min_nodes <= nodes <= limits.max_nodes:
        yield f"it has {nodes} syntax nodes, not {limits.min_nodes} to {limits.max_nodes}"


def _imports(tree: ast.Module, limits: StaticLimits) -> Iterator[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {item.name.split(".")[0] for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or ".").split(".")[0] if not node.level else ".")
    for name in sorted(found & (limits.blocked_imports | {"."})):
        yield f"it imports {name}: use env instead" if name != "." else "it has a relative import"


def _names(tree: ast.Module, limits: StaticLimits) -> Iterator[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in sorted(names & limits.blocked_names):
        yield f"it uses {name}"
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for name in sorted(attributes):
        if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__class__"):
            yield f"it uses {name}"


def _inputs(source: Source) -> Iterator[str]:
    """A verdict that rests on none of its inputs says nothing about the rollout."""
    parameters = {name: parameter for name, parameter in input_names(source.function).items() if name in _EVIDENCE}
    starred = {item.arg for item in (source.function.args.vararg, source.function.args.kwarg) if item is not None}
    read = {
        node.id for node in ast.walk(source.function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    if not read & ({*parameters.values()} | starred):
        yield f"{source.function.name} looks at none of its inputs"


def _constant(function: Function) -> Iterator[str]:
    returns = [node for node in _own_nodes(function) if isinstance(node, ast.Return)]
    if all(_is_none(node.value) for node in returns):
        yield f"{function.name} never returns a score"
        return
    values = [_literal(node.value) for node in returns]
    if None not in values and len(set(values)) == 1 and not _falls_through_to_error(function):
        yield f"{function.name} always returns {values[0]}"


def _literal(node: ast.expr | None) -> str | None:
    """A returned constant as one text for equal scores; None for anything computed."""
    names = {"TASK_SUCCESSFUL_SCORE": 1.0, "TASK_FAILED_SCORE": 0.0}
    if isinstance(node, ast.Name) and node.id in names:
        return str(names[node.id])
    if isinstance(node, ast.Dict):
        node = next((v for k, v in zip(node.keys, node.values, strict=True) if _is_score(k)), None)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return f"-{node.operand.value!r}"
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return str(float(node.value))
    return None


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _is_score(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == "score"


def _falls_through_to_error(function: Function) -> bool:
    """Code that raises for a wrong result gives no verdict there, but at least not always the same score."""
    return any(isinstance(node, ast.Raise | ast.Assert) for node in _own_nodes(function))


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions and classes inside it."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            todo.extend(ast.iter_child_nodes(node))
