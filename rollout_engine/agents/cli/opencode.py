"""opencode (package opencode-ai): `opencode run`, over chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rollout_engine.agents.cli.events import at, events_of, number_at, reason, text_at
from rollout_engine.agents.cli.factory import Factory
from rollout_engine.agents.cli.program import KEY, Heard, Launch, Package, Program


def _command(launch: Launch) -> list[str]:
    # Without a title it asks the model for one first.
    return ["run", "--format", "json", "--title", "rollout"]


def _env(launch: Launch) -> Mapping[str, str]:
    model = f"rollout/{launch.model}"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{launch.url}/v1", "apiKey": KEY},
        "models": {launch.model: {}},
    }
    config = {
        "model": model,
        "small_model": model,
        "autoupdate": False,
        "share": "disabled",
        "provider": {"rollout": provider},
        "permission": {"*": "allow"},
    }
    return {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }


def hear(stdout: bytes, result: bytes | None) -> Heard:
    """Texts and steps; each step has its own usage, and the last one its reason to stop."""
    final = failed = last = None
    prompt = completion = 0
    for event in events_of(stdout):
        kind = event.get("type")
        if kind == "text":
            final = text_at(event, "part.text")
        elif kind == "error":
            failed = reason(at(event, "error.data.message") or event.get("error"))
        elif kind == "step_finish":
            last = text_at(event, "part.reason")
            tokens = "part.tokens"
            prompt += number_at(event, f"{tokens}.input") + number_at(event, f"{tokens}.cache.read")
            completion += number_at(event, f"{tokens}.output") + number_at(event, f"{tokens}.reasoning")
    return Heard(final, failed, last is not None and last != "tool-calls", prompt, completion)


AGENT = Factory(
    Program(
        name="opencode",
        command=_command,
        binary="opencode",
        package=Package(
            "npm",
            ("opencode-ai@1.18.33",),
            {
                "x86_64": "node_modules/opencode-linux-x64-baseline/bin/opencode",
                "aarch64": "node_modules/opencode-linux-arm64/bin/opencode",
            },
        ),
        env=_env,
        hear=hear,
    )
)
