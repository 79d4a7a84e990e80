"""The agent `command`: any program, described by the run's config."""

from __future__ import annotations

from functools import partial
from typing import Any

from rollout_engine.agents.cli.agent import CliAgent
from rollout_engine.agents.cli.events import at, events_of, number_at, reason
from rollout_engine.agents.cli.options import CommandOptions, EventOption, EventsOption
from rollout_engine.agents.cli.program import Heard, Program
from rollout_engine.errors import InputError
from rollout_engine.problems import checked


class _Command:
    """Takes `agent_options`. Raises InputError."""

    needs_sandbox = True

    def __call__(self, **options: Any) -> CliAgent:
        given = checked(CommandOptions, options, "agent_options")
        _check(given)
        return CliAgent(_program(given), given)


AGENT = _Command()


def _check(given: CommandOptions) -> None:
    if given.package is not None:
        fix = "install it into a directory and name that, or use an image that has it"
        raise InputError("a program of your own has no package", "agent_options.package", fix)
    named = any("{prompt}" in part for part in given.argv)
    if given.prompt == "argument" and not named:
        raise InputError("no argument holds {prompt}", "agent_options.argv", "put it where the prompt belongs")


def _program(given: CommandOptions) -> Program:
    return Program(
        name="command",
        command=lambda launch: [launch.fill(part) for part in given.argv[1:]],
        binary=given.argv[0],
        prompt=given.prompt,
        hear=partial(_hear, given),
        result=given.answer_file,
        own_models=given.own_models,
    )


def _hear(given: CommandOptions, stdout: bytes, result: bytes | None) -> Heard:
    heard = _read(given.events, stdout) if given.events is not None else Heard()
    final = heard.final
    if given.answer_file is not None:
        final = result.decode(errors="replace").strip() if result is not None else None
    elif given.answer is not None:
        final = stdout.decode(errors="replace").strip() if given.answer == "stdout" else None
    return Heard(final, heard.failed, None, heard.prompt_tokens, heard.completion_tokens)


def _read(rules: EventsOption, stdout: bytes) -> Heard:
    final = failed = None
    prompt = completion = 0
    for event in events_of(stdout):
        if _fits(rules.final, event) and isinstance(found := at(event, _path(rules.final)), str):
            final = found
        if _fits(rules.failed, event):
            failed = reason(at(event, _path(rules.failed)))
        prompt += number_at(event, _path(rules.prompt_tokens)) if _fits(rules.prompt_tokens, event) else 0
        completion += number_at(event, _path(rules.completion_tokens)) if _fits(rules.completion_tokens, event) else 0
    known = rules.prompt_tokens is not None, rules.completion_tokens is not None
    return Heard(final, failed, None, prompt if known[0] else None, completion if known[1] else None)


def _fits(rule: EventOption | None, event: dict[str, Any]) -> bool:
    return rule is not None and all(at(event, name) == value for name, value in rule.when.items())


def _path(rule: EventOption | None) -> str:
    return rule.take if rule is not None else ""
