"""Claude Code (package @anthropic-ai/claude-code): `claude -p`, over Anthropic's messages."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_engine.agents.cli.events import events_of, number_at, reason, text_at
from rollout_engine.agents.cli.factory import Factory
from rollout_engine.agents.cli.program import KEY, Heard, Launch, Package, Program


def _command(launch: Launch) -> list[str]:
    # Without --verbose it refuses this format.
    return ["-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]


def _env(launch: Launch) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": launch.url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_MODEL": launch.model,
        "ANTHROPIC_SMALL_FAST_MODEL": launch.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": launch.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "1",
        "DISABLE_AUTOUPDATER": "1",
        # Root is refused --dangerously-skip-permissions elsewhere.
        "IS_SANDBOX": "1",
    }


def hear(stdout: bytes, result: bytes | None) -> Heard:
    """The `result` at the end; `is_error` says how it went: `subtype` is `success` after an error of the API too."""
    found = next((event for event in events_of(stdout) if event.get("type") == "result"), None)
    if found is None:
        return Heard(finished=False)
    failed = None
    if found.get("is_error"):
        failed = reason(found.get("result") or found.get("errors") or found.get("subtype"))
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    prompt = sum(number_at(found, f"usage.{name}") for name in names)
    final = None if failed else text_at(found, "result")
    return Heard(final, failed, True, prompt, number_at(found, "usage.output_tokens"))


AGENT = Factory(
    Program(
        name="claude_code",
        command=_command,
        binary="claude",
        package=Package(
            "npm",
            ("@anthropic-ai/claude-code@2.1.328",),
            {
                "x86_64": "node_modules/@anthropic-ai/claude-code-linux-x64/claude",
                "aarch64": "node_modules/@anthropic-ai/claude-code-linux-arm64/claude",
            },
        ),
        env=_env,
        hear=hear,
    )
)
