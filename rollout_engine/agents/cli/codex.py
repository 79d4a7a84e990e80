"""Codex (package @openai/codex): `codex exec`, over responses."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rollout_engine.agents.cli.events import at, events_of, number_at, reason, text_at
from rollout_engine.agents.cli.factory import Factory
from rollout_engine.agents.cli.program import KEY, Heard, Launch, Package, Program


def _command(launch: Launch) -> list[str]:
    # The quotes of JSON strings are TOML's too. An address in the environment would be ignored.
    provider = (
        f'{{name="rollout",base_url={json.dumps(launch.url + "/v1")},env_key="ROLLOUT_KEY",wire_api="responses",'
        "request_max_retries=1,stream_max_retries=1}"
    )
    return [
        *("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("-m", launch.model, "-c", "model_provider=rollout", "-c", f"model_providers.rollout={provider}", "-"),
    ]


def _env(launch: Launch) -> Mapping[str, str]:
    return {"ROLLOUT_KEY": KEY}


def hear(stdout: bytes, result: bytes | None) -> Heard:
    """An `error` may be followed by another try: only a turn that failed is the end."""
    final = failed = None
    finished, prompt, completion = False, 0, 0
    for event in events_of(stdout):
        kind = event.get("type")
        if kind == "item.completed" and at(event, "item.type") == "agent_message":
            final = text_at(event, "item.text")
        elif kind == "turn.failed":
            failed = reason(at(event, "error.message"))
        elif kind == "turn.completed":
            finished = True
            prompt += number_at(event, "usage.input_tokens")
            completion += number_at(event, "usage.output_tokens")
    return Heard(final, failed, finished, prompt, completion)


_PLACE = "node_modules/@openai/codex-linux-{}/vendor/{}-unknown-linux-musl/bin/codex"

AGENT = Factory(
    Program(
        name="codex",
        command=_command,
        binary="codex",
        package=Package(
            "npm",
            ("@openai/codex@0.169.0",),
            {"x86_64": _PLACE.format("x64", "x86_64"), "aarch64": _PLACE.format("arm64", "aarch64")},
        ),
        env=_env,
        hear=hear,
    )
)
