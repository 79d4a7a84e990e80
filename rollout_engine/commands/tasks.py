"""`rollout tasks check`: every line of a file of tasks, and each verifier on answers that none should pass."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from rollout_engine.commands import text
from rollout_engine.commands.console import OK, SOME_FAILED, make_console, print_json
from rollout_engine.config import RunConfig
from rollout_engine.dryrun import dry_run
from rollout_engine.options import load_config
from rollout_engine.taskcheck import Finding, find_problems
from rollout_engine.tasks import TaskFile, check_tasks, read_tasks

MAX_SHOWN = 50
"""Findings printed for a person; --json holds all."""
STYLES = {"error": "red", "note": "yellow"}


def check(path: Path, config: Path | None, limit: int | None, *, dry_run: bool, as_json: bool) -> int:
    """Exit code 1 where a verifier is wrong or its dry run could not be had. Raises InputError where the file is."""
    settings = load_config(config)
    found = check_tasks(path, settings)
    findings = asyncio.run(_findings(path, limit, settings if dry_run else None))
    errors = sum(finding.severity == "error" for finding in findings)
    if as_json:
        print_json({**asdict(found), "errors": errors, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(found, findings, min(found.count, limit or found.count))
    return SOME_FAILED if errors or (dry_run and findings) else OK


async def _findings(path: Path, limit: int | None, dry: RunConfig | None) -> list[Finding]:
    """Of the bad answers, and with a config of the dry run as well."""
    findings = [finding async for finding in find_problems(islice(read_tasks(path), limit))]
    if dry is None:
        return findings
    tried = await dry_run(islice(read_tasks(path), limit), dry)
    return [finding for finding in findings if finding.severity != "note"] + tried


def _show(found: TaskFile, findings: list[Finding], tried: int) -> None:
    from rich.table import Table
    from rich.text import Text

    console = make_console()
    sandboxed = f", {text.whole(found.sandboxed)} of them in a sandbox" if found.sandboxed else ""
    console.print(f"{found.path}: {text.plural(found.count, 'task')}{sandboxed}, every line is valid")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, max_width=40, overflow="ellipsis")
    table.add_column(overflow="fold")
    for finding in findings[:MAX_SHOWN]:
        severity = Text(finding.severity, style=STYLES[finding.severity])
        table.add_row(severity, Text(text.safe(finding.task_id)), Text(text.safe(finding.what)))
    if findings:
        console.print(table)
    if len(findings) > MAX_SHOWN:
        console.print(f"… and {len(findings) - MAX_SHOWN:,} more (--json has all)")
    console.print(_verdict(findings, tried))


def _verdict(findings: list[Finding], tried: int) -> str:
    """`tried`: how many were to be tried."""
    wrong = {finding.task_id for finding in findings if finding.severity == "error"}
    untried = len({finding.task_id for finding in findings} - wrong)
    skipped = f"; {text.plural(untried, 'verifier')} not tried" if untried else ""
    if wrong:
        return f"{text.plural(len(wrong), 'verifier')} of {text.whole(tried)} cannot be trusted{skipped}"
    if untried == tried:
        return f"{text.plural(untried, 'verifier')} not tried"
    right = "none passes what it should not, each passes its own solution where there is one"
    return f"{text.plural(tried - untried, 'verifier')} tried: {right}{skipped}"
