"""Cuts a shell script into pieces that can be run one after the other, each by a shell of its own."""

from __future__ import annotations

import re
import shlex

_HEREDOC = re.compile(r"<<(?P<dash>-?)\s*(?P<quote>['\"]?)(?P<word>[A-Za-z_]\w*)(?P=quote)(?!\S*<<)")
_GOES_ON = ("\\", "|", "&&", "||", "{", "(")
_COMPOUND = re.compile(r"(?:^|[;&|(]\s*)(?:if|for|while|until|case|function|\{|\()(?=\s|$)")
_STATE = re.compile(
    r"(?:^|[;&|(])\s*(?:(?:cd|export|set|umask|trap|alias|unset|exec|eval|source|read|\.)(?=\s|$)|[A-Za-z_]\w*(?:=|\s*\(\)))"
)
"""What changes the shell itself: a directory, an option, a variable, a function."""


def pieces_of_script(script: str, count: int) -> list[str]:
    """At most `count` pieces in the script's order; fewer where it has fewer that stand alone.

    Cut are simple commands of one line, and those with one here-document. From the first line on that is neither,
    or that changes the shell itself, all stays together: a piece too large is right, a piece too small is not.
    """
    units = _units(script)
    count = min(count, len(units))
    return ["\n".join(units[at * len(units) // count : (at + 1) * len(units) // count]) for at in range(count)]


def _units(script: str) -> list[str]:
    units: list[str] = []
    lines = script.strip("\n").split("\n")
    at = 0
    while at < len(lines):
        end = _end_of_command(lines, at)
        unit = "\n".join(lines[at:end])
        at = end
        if unit.strip() and not unit.lstrip().startswith("#"):
            units.append(unit)
    return units


def _end_of_command(lines: list[str], at: int) -> int:
    """The line after the command at `at`; the end of the script where it cannot be told."""
    line = lines[at]
    heredoc = _HEREDOC.search(line)
    if heredoc is not None:
        line = line.replace(heredoc[0], "", 1)
    if not _is_simple(line):
        return len(lines)
    if heredoc is None:
        return at + 1
    for end in range(at + 1, len(lines)):
        found = lines[end].lstrip("\t") if heredoc["dash"] else lines[end]
        if found == heredoc["word"]:
            return end + 1
    return len(lines)


def _is_simple(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:  # a quote goes on in the next line
        return False
    odd = "<<" in line or "`" in line or _COMPOUND.search(line) or _STATE.search(line)
    return not odd and not line.rstrip().endswith(_GOES_ON)
