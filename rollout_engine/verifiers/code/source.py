"""What a task's verifier code says of itself before it runs: its function, and whether it looks at `env`. Pure."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from rollout_engine.errors import InputError, describe
from rollout_engine.verifiers.code.judging import runner

MAX_CODE_BYTES = 256 * 1024
_LOOKS_AROUND = frozenset({"locals", "vars", "eval", "exec", "inspect", "_getframe"})
"""Code that uses one of these may read a parameter without naming it."""

_IMPORTS_UNSEEN = frozenset({"__import__", "importlib", "eval", "exec", "compile", "sys", "__loader__", "__spec__"})
"""Code that uses one of these may import what it does not name, or ask after its interpreter."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """Verifier code that parses, and what is known of it."""

    code: str
    tree: ast.Module
    function: Function
    uses_env: bool
    imports: frozenset[str] | None
    """The modules that it names; None where it may need others, or the interpreter's own parts."""


def parse(code: str) -> Source:
    """Raises InputError about code that can never come to a verdict."""
    where = "verifier.code"
    if len(code.encode("utf-8", "replace")) > MAX_CODE_BYTES:
        raise InputError(f"has more than {MAX_CODE_BYTES} bytes", where, "put large data into the task's files")
    try:
        tree = runner.plain(ast.parse(code, runner.FILE))
        name = runner.entry(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"is no Python: {describe(error)}", where, "fix the code") from error
    if name is None:
        raise InputError(
            "defines no verifier function", where, "define `def verify(env, final_answer=None, conversation=None)`"
        )
    function = [node for node in tree.body if isinstance(node, Function) and node.name == name][-1]
    return Source(code, tree, function, _uses_env(tree, function), _imports(tree))


def input_names(function: Function) -> dict[str, str]:
    """Input (`env`, `final_answer`, `conversation`) -> the parameter that gets it, as `runner.call` gives them."""
    positional = [item.arg for item in (*function.args.posonlyargs, *function.args.args)]
    given = runner.assign(positional, [item.arg for item in function.args.kwonlyargs])
    return {wanted: parameter for parameter, wanted in given.items()}


def _uses_env(tree: ast.Module, function: Function) -> bool:
    """Whether the code may look at `env`; said of too much rather than of too little."""
    if function.decorator_list or function.args.vararg is not None or function.args.kwarg is not None:
        return True
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if names & _LOOKS_AROUND:
        return True
    parameter = input_names(function).get("env")
    reads = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return parameter is not None and any(node.id == parameter for node in reads)


def _imports(tree: ast.Module) -> frozenset[str] | None:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return None if _hides_imports(tree) else frozenset(found)


def _hides_imports(tree: ast.Module) -> bool:
    """Asynchronous code is among it: it needs asyncio."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    waits = any(isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in ast.walk(tree))
    return waits or bool(names & _IMPORTS_UNSEEN)
