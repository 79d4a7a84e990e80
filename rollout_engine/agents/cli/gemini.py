"""Gemini CLI (package @google/gemini-cli): `gemini --approval-mode yolo`, over generateContent. Needs node there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from rollout_engine.agents.cli.events import at, number_at, parsed, reason, text_at
from rollout_engine.agents.cli.factory import Factory
from rollout_engine.agents.cli.program import KEY, Heard, Launch, Package, Program
from rollout_engine.proxy.roles import SUB, RoleRule


def _command(launch: Launch) -> list[str]:
    return ["-m", launch.model, "--approval-mode", "yolo", "--skip-trust", "--output-format", "json"]


def _env(launch: Launch) -> Mapping[str, str]:
    return {"GOOGLE_GEMINI_BASE_URL": launch.url, "GEMINI_API_KEY": KEY, "GEMINI_CLI_NO_RELAUNCH": "true"}


def _files(launch: Launch) -> Mapping[str, str]:
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "privacy": {"usageStatisticsEnabled": False},
    }
    return {".gemini/settings.json": json.dumps(settings)}


def _rules(model: str) -> tuple[RoleRule, ...]:
    """It asks smaller models of its own choice beside the one that it was given."""
    return (RoleRule(SUB, model=f"(?!{re.escape(model)}$).*"),)


def hear(stdout: bytes, result: bytes | None) -> Heard:
    """One JSON object at the end, after what extensions may print."""
    found = parsed(stdout[max(stdout.find(b"{"), 0) :])
    if not isinstance(found, dict):
        return Heard(finished=False)
    failed = reason(at(found, "error.message")) if found.get("error") else None
    models = at(found, "stats.models")
    counts = list(models.values()) if isinstance(models, dict) else []
    prompt = sum(number_at(each, "tokens.prompt") for each in counts)
    completion = sum(number_at(each, "tokens.candidates") + number_at(each, "tokens.thoughts") for each in counts)
    return Heard(text_at(found, "response"), failed, True, prompt, completion)


AGENT = Factory(
    Program(
        name="gemini",
        command=_command,
        binary="gemini",
        package=Package(
            "npm", ("@google/gemini-cli@0.61.0",), {"*": "node_modules/@google/gemini-cli/bundle/gemini.js"}
        ),
        interpreter=("node",),
        env=_env,
        files=_files,
        hear=hear,
        own_models=True,
        rules=_rules,
    )
)
