"""Runs one task's verifier code and says what it returned.

What few verdicts need is imported where they do: in a fresh interpreter, imports are most of a verdict's cost.
A verdict is a dict: {"score", "components", "passed"}, or {"failed": "raised" | "returned", "text"}.
"""

from __future__ import annotations

import _ast as ast
import builtins
import math
import types

from rollout_engine.verifiers.code.judging.names import names_for

TYPE_CHECKING = False  # to import `typing` would cost more than all the rest
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from typing import Any

FILE = "verifier_code.py"
MAX_TEXT = 1500
MAX_COMPONENTS = 100
ENTRY_NAMES = ("verify", "validate_task")
INPUTS = ("env", "final_answer", "conversation")


class BadReturn(Exception):
    """The code ran to its end and returned something that is no score."""


def judge(code: str, final_answer: str | None, conversation: list[Any], env: Any) -> dict[str, Any]:
    """The verdict of one run of the code. Whatever the code does, short of ending the process, is in it."""
    try:
        function = load(code)
        result = call(function, {"env": env, "final_answer": final_answer, "conversation": conversation})
        return finding(result)
    except BadReturn as error:
        return {"failed": "returned", "text": str(error)[:MAX_TEXT]}
    except BaseException as error:
        return {"failed": "raised", "text": describe(error, code)}


def load(code: str) -> Callable[..., Any]:
    """The function that the code means, after running the code in one namespace."""
    tree = plain(parse(code))
    name = entry(tree)
    if name is None:
        raise BadReturn("the code defines no function `verify` or `validate_task`, and none that takes `env`")
    used = {node.id for node in walk(tree) if isinstance(node, ast.Name)}
    namespace = {**names_for(used), "__name__": "verifier_code", "__builtins__": builtins}
    exec(compile(tree, FILE, "exec", dont_inherit=True), namespace)
    function: Callable[..., Any] = namespace[name]
    return function


def parse(code: str) -> ast.Module:
    """As `ast.parse` does, without the package `ast`."""
    tree = compile(code, FILE, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def plain(tree: ast.Module) -> ast.Module:
    """Without what only the reference's own client knows: imports of `fleet`, and its decorator."""
    tree.body = [node for node in tree.body if not _is_fleet(node)] or [ast.Pass(lineno=1, col_offset=0)]
    for node in walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.decorator_list = [item for item in node.decorator_list if not _is_verifier(item)]
    return tree


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, as `ast.walk` does."""
    todo = [node]
    while todo:
        node = todo.pop()
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            todo.extend(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, ast.AST))


def _is_fleet(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and (node.module or "").split(".")[0] == "fleet"
    return isinstance(node, ast.Import) and all(item.name.split(".")[0] == "fleet" for item in node.names)


def _is_verifier(node: ast.expr) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", "")) == "verifier"


def entry(tree: ast.Module) -> str | None:
    """`verify`, else `validate_task`, else the last function at the top that takes `env`."""
    found = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [node.name for node in found]
    takers = [node.name for node in found if "env" in parameters(node)]
    return next((name for name in ENTRY_NAMES if name in names), takers[-1] if takers else None)


def parameters(node: Any) -> list[str]:
    """The names of a definition's parameters, in order; those that only a keyword reaches come last."""
    return [item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def assign(positional: Sequence[str], keyword_only: Sequence[str] = ()) -> dict[str, str]:
    """Parameter -> input: by name, where the code uses the names, else by place among the rest."""
    rest = iter([name for name in INPUTS if name not in (*positional, *keyword_only)])
    given = {}
    for name in positional:
        wanted = name if name in INPUTS else next(rest, None)
        if wanted is not None:
            given[name] = wanted
    given.update({name: name for name in keyword_only if name in INPUTS})
    return given


def call(function: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """Calls it with the inputs that it takes, and awaits what needs it."""
    places, keyword_only, takes_more, takes_keywords = shape(function)
    given = assign(places, keyword_only)
    positional = [inputs[given[name]] for name in places if name in given]
    keywords = {name: inputs[wanted] for name, wanted in given.items() if name not in places}
    rest = [name for name in INPUTS if name not in given.values()]
    if takes_keywords:
        keywords.update({name: inputs[name] for name in rest})
    elif takes_more:
        positional += [inputs[name] for name in rest]
    result = function(*positional, **keywords)
    if not isinstance(result, types.CoroutineType) and not hasattr(type(result), "__await__"):
        return result
    import asyncio

    return asyncio.run(_wait(result))


def shape(function: Any) -> tuple[list[str], list[str], bool, bool]:
    """Parameters by place and by keyword alone, and whether there are `*` and `**`; a decorator's by what it wraps."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if isinstance(function, types.FunctionType):
        code = function.__code__
        places, named = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
        names = list(code.co_varnames)
        return names[:places], names[places:named], bool(code.co_flags & 4), bool(code.co_flags & 8)
    import inspect

    kinds: dict[str, list[str]] = {}
    for parameter in inspect.signature(function).parameters.values():
        kinds.setdefault(parameter.kind.name, []).append(parameter.name)
    by_place = kinds.get("POSITIONAL_ONLY", []) + kinds.get("POSITIONAL_OR_KEYWORD", [])
    return by_place, kinds.get("KEYWORD_ONLY", []), "VAR_POSITIONAL" in kinds, "VAR_KEYWORD" in kinds


async def _wait(result: Awaitable[Any]) -> Any:
    return await result


def finding(result: Any) -> dict[str, Any]:
    """A number, a bool, or an object with a `score`, and perhaps `components` and `passed`."""
    value: Any = result
    parts: Any = {}
    passed: Any = None
    if isinstance(result, dict):
        if "score" not in result:
            raise BadReturn(f"returned a dict without `score`: {result!r:.300}")
        value, parts, passed = result["score"], result.get("components") or {}, result.get("passed")
    elif not isinstance(result, (bool, int, float)) and hasattr(result, "score"):
        value = result.score
    if not isinstance(parts, dict) or len(parts) > MAX_COMPONENTS:
        raise BadReturn(f"`components` must be a dict of at most {MAX_COMPONENTS} numbers, found {parts!r:.300}")
    if not isinstance(passed, (bool, type(None))):
        raise BadReturn(f"`passed` must be true or false, found {passed!r:.300}")
    numbers = {str(name)[:80]: number(part, f"component {name!r:.80}") for name, part in parts.items()}
    return {"score": number(value, "the score"), "components": numbers, "passed": passed}


def number(value: Any, what: str) -> float:
    if value is None or isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise BadReturn(f"{what} is {value!r:.300}, not a number (None is no verdict: return 0.0 to fail)")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadReturn(f"{what} is {value!r:.300}: {error}") from None
    if not math.isfinite(found):
        raise BadReturn(f"{what} is {found}, which is not finite")
    return found


def describe(error: BaseException, code: str) -> str:
    """The tail of the traceback, from the code's own first line on."""
    try:
        import linecache
        import traceback

        linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
        steps = error.__traceback__
        while steps is not None and steps.tb_frame.f_code.co_filename != FILE:
            steps = steps.tb_next
        lines = traceback.format_exception(type(error), error, steps or error.__traceback__, limit=-8)
        return "".join(lines).strip()[-MAX_TEXT:]
    except BaseException:  # its own __str__ may do anything
        return type(error).__name__
