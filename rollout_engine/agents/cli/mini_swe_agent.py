"""mini-swe-agent (package mini-swe-agent): `mini`, over chat completions that are not streamed. Needs Python there."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_engine.agents.cli.events import parsed, reason, text_at
from rollout_engine.agents.cli.factory import Factory
from rollout_engine.agents.cli.program import KEY, MOUNT, Heard, Launch, Package, Program

TRAJECTORY = "trajectory.json"
SUBMITTED = "Submitted"


def _command(launch: Launch) -> list[str]:
    out = f"{launch.home}/{TRAJECTORY}"
    return ["-t", launch.prompt, "-m", f"openai/{launch.model}", "-y", "--exit-immediately", "-l", "0", "-o", out]


def _env(launch: Launch) -> Mapping[str, str]:
    return {
        "PYTHONPATH": MOUNT,
        "OPENAI_API_BASE": f"{launch.url}/v1",
        "OPENAI_API_KEY": KEY,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": launch.home,
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def hear(stdout: bytes, result: bytes | None) -> Heard:
    """Its trajectory says how it ended; tokens are not in it."""
    found = parsed(result)
    status = text_at(found, "info.exit_status")
    if status is None:
        return Heard(finished=False)
    failed = None if status == SUBMITTED else reason(status)
    return Heard(text_at(found, "info.submission") or None, failed, True)


AGENT = Factory(
    Program(
        name="mini_swe_agent",
        command=_command,
        binary="mini",
        # litellm imports mcp and does not ask for it.
        package=Package("pip", ("mini-swe-agent==2.4.6", "mcp"), {"*": "bin/mini"}),
        interpreter=("python3",),
        env=_env,
        prompt="argument",
        hear=hear,
        result=TRAJECTORY,
    )
)
