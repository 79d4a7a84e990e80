"""`rollout doctor`: what this machine can do, line by line, with what to do about what it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rollout_engine.commands import checks
from rollout_engine.commands.checks import Finding
from rollout_engine.commands.console import OK, SOME_FAILED, make_console, print_json

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(config: Path | None, as_json: bool) -> int:
    """Exit code 0 where nothing has failed (a warning is no failure), else 1."""
    wanted = _key_variables(config) if config is not None else []
    findings = _findings(wanted)
    if as_json:
        found = list(findings)
        print_json({"ok": _healthy(found), "findings": [asdict(finding) for finding in found]})
    else:
        found = _show(findings)
    return OK if _healthy(found) else SOME_FAILED


def _findings(wanted: list[str]) -> Iterator[Finding]:
    for check in checks.CHECKS:
        yield from check()
    yield from checks.api_keys(wanted)


def _healthy(findings: list[Finding]) -> bool:
    return all(finding.level != "fail" for finding in findings)


def _show(findings: Iterator[Finding]) -> list[Finding]:
    """Prints each line as soon as it is known: some checks take seconds."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console, shown = make_console(), []
    for finding in findings:
        shown.append(finding)
        row = Table.grid(padding=(0, 2))
        row.add_column(width=4)
        row.add_column(width=13)
        row.add_column()
        body = Text(finding.found)
        if finding.fix:
            body.append(f"\n→ {finding.fix}", style="cyan")
        row.add_row(Text(finding.level, style=STYLES[finding.level]), finding.area, body)
        console.print(Padding(row, (0, 0, 0, 1), expand=False))
    counts = {level: sum(finding.level == level for finding in shown) for level in STYLES}
    console.print()
    console.print(" " + ", ".join(f"{count} {level}" for level, count in counts.items() if count))
    return shown


def _key_variables(config: Path) -> list[str]:
    """The variables that a config's models name. Raises InputError."""
    from rollout_engine.config import KEY_VARIABLES, key_variables
    from rollout_engine.options import load_config

    models = load_config(config).models
    return sorted({name for model in models if model.kind in KEY_VARIABLES for name in key_variables(model)[:1]})
