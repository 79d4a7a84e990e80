"""Runs one task's verifier code and says what it returned. Alone inside a sandbox: standard library only.

Its whole text is given to a fresh interpreter (`main`), or it is imported by the warm verifier before that forks.
A verdict is a dict: {"score", "components", "passed"}, or {"failed": "raised" | "returned", "text"}.
What few verdicts need is imported where they do: in a fresh interpreter, imports are most of a verdict's cost.
"""

import ast
import builtins
import json
import math
import os
import re
import string
import sys
import types

FILE = "verifier_code.py"
MAX_TEXT = 1500
MAX_COMPONENTS = 100
ENTRY_NAMES = ("verify", "validate_task")
INPUTS = ("env", "final_answer", "conversation")


class BadReturn(Exception):
    """The code ran to its end and returned something that is no score."""


def judge(code, final_answer, conversation, env):
    """The verdict of one run of the code. Whatever the code does, short of ending the process, is in it."""
    try:
        function = load(code)
        result = call(function, {"env": env, "final_answer": final_answer, "conversation": conversation})
        return finding(result)
    except BadReturn as error:
        return {"failed": "returned", "text": str(error)[:MAX_TEXT]}
    except BaseException as error:
        return {"failed": "raised", "text": describe(error, code)}


def load(code):
    """The function that the code means, after running the code in one namespace."""
    tree = plain(ast.parse(code, FILE))
    name = entry(tree)
    if name is None:
        raise BadReturn("the code defines no function `verify` or `validate_task`, and none that takes `env`")
    namespace = {**HELPERS, "__name__": "verifier_code", "__builtins__": builtins}
    exec(compile(tree, FILE, "exec", dont_inherit=True), namespace)
    return namespace[name]


def plain(tree):
    """Without what only the reference's own client knows: imports of `fleet`, and its decorator."""
    tree.body = [node for node in tree.body if not _is_fleet(node)] or [ast.Pass(lineno=1, col_offset=0)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.decorator_list = [item for item in node.decorator_list if not _is_verifier(item)]
    return tree


def _is_fleet(node):
    if isinstance(node, ast.ImportFrom):
        return not node.level and (node.module or "").split(".")[0] == "fleet"
    return isinstance(node, ast.Import) and all(item.name.split(".")[0] == "fleet" for item in node.names)


def _is_verifier(node):
    node = node.func if isinstance(node, ast.Call) else node
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == "verifier"


def entry(tree):
    """`verify`, else `validate_task`, else the last function at the top that takes `env`."""
    found = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [node.name for node in found]
    takers = [node.name for node in found if "env" in parameters(node)]
    return next((name for name in ENTRY_NAMES if name in names), takers[-1] if takers else None)


def parameters(node):
    """The names of a definition's parameters, in order; those that only a keyword reaches come last."""
    return [item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def assign(positional, keyword_only=()):
    """Parameter -> input: by name, where the code uses the names, else by place among the rest."""
    rest = iter([name for name in INPUTS if name not in (*positional, *keyword_only)])
    given = {}
    for name in positional:
        wanted = name if name in INPUTS else next(rest, None)
        if wanted is not None:
            given[name] = wanted
    given.update({name: name for name in keyword_only if name in INPUTS})
    return given


def call(function, inputs):
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


def shape(function):
    """Parameters by place and by keyword alone, and whether there are `*` and `**`; a decorator's by what it wraps."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if isinstance(function, types.FunctionType):
        code = function.__code__
        ends = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
        names = list(code.co_varnames)
        return names[: ends[0]], names[ends[0] : ends[1]], code.co_flags & 4, code.co_flags & 8
    import inspect

    kinds = {}
    for parameter in inspect.signature(function).parameters.values():
        kinds.setdefault(parameter.kind.name, []).append(parameter.name)
    places = kinds.get("POSITIONAL_ONLY", []) + kinds.get("POSITIONAL_OR_KEYWORD", [])
    return places, kinds.get("KEYWORD_ONLY", []), "VAR_POSITIONAL" in kinds, "VAR_KEYWORD" in kinds


async def _wait(result):
    return await result


def finding(result):
    """A number, a bool, or an object with a `score`, and perhaps `components` and `passed`."""
    parts, passed = {}, None
    value = result
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


def number(value, what):
    if value is None or isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise BadReturn(f"{what} is {value!r:.300}, not a number (None is no verdict: return 0.0 to fail)")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadReturn(f"{what} is {value!r:.300}: {error}") from None
    if not math.isfinite(found):
        raise BadReturn(f"{what} is {found}, which is not finite")
    return found


def describe(error, code):
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


# What the code finds in its namespace beside the builtins.


def normalized_contains(target, blob):
    """Whether a text holds another, apart from case, punctuation and white space."""
    return _normalized(target) in _normalized(blob)


def _normalized(text):
    return " ".join(str(text).lower().translate(str.maketrans("", "", string.punctuation)).split())


def extract_numbers(text):
    """Every number in a text, as floats; commas between digits are dropped."""
    return [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?", str(text).replace(",", ""))]


def contains_number(text, target):
    """Whether a text holds this number."""
    if isinstance(target, str):
        try:
            target = float(target.replace(",", ""))
        except ValueError:
            return False
    return any(math.isclose(found, float(target), rel_tol=1e-9, abs_tol=1e-9) for found in extract_numbers(text))


class IgnoreConfig:
    """What a comparison of databases leaves out."""

    def __init__(self, tables=None, fields=None, table_fields=None):
        self.tables, self.fields = set(tables or ()), set(fields or ())
        self.table_fields = dict(table_fields or {})

    def should_ignore_table(self, table):
        return table in self.tables

    def should_ignore_field(self, table, field):
        return field in self.fields or field in self.table_fields.get(table, ())


HELPERS = {
    "TASK_SUCCESSFUL_SCORE": 1,
    "TASK_FAILED_SCORE": 0,
    "normalized_contains": normalized_contains,
    "extract_numbers": extract_numbers,
    "contains_number": contains_number,
    "IgnoreConfig": IgnoreConfig,
    "Environment": object,
    "json": json,
    "re": re,
    "string": string,
}


# A fresh interpreter's own life.


class LatePackages:
    """Finds installed packages, once something that is not in the standard library is imported."""

    def __init__(self):
        self.added = False

    def find_spec(self, name, path=None, target=None):
        if path is not None or self.added:
            return None
        self.added = True
        import site
        from importlib.machinery import PathFinder

        site.ENABLE_USER_SITE = False
        site.main()
        return PathFinder.find_spec(name)


def hide():
    """Other programs of the same user may not look into this one for its answer."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def answer(verdict, descriptor, owner):
    """Writes the verdict and ends the process at once: no other thread, hook or child has a say."""
    if os.getpid() == owner:
        data = json.dumps(verdict).encode()
        while data:
            data = data[os.write(descriptor, data) :]
    os._exit(0)


def main(make_env):
    """Takes a request from standard input, and gives its verdict to what was standard output.

    What the code prints goes to standard error, where it cannot be taken for a verdict.
    """
    owner, descriptor = os.getpid(), os.dup(1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.meta_path.append(LatePackages())
    hide()
    env = make_env(request["workdir"]) if request["uses_env"] else None
    answer(judge(request["code"], request["final_answer"], request["conversation"], env), descriptor, owner)
