"""The main job end to end: bundled tasks, two scripted models behind real HTTP servers, on Ray, with the reward table.

The models work by tool calls, each rollout in a sandbox of its own, and what it left there is verified in another.

make demo          (or: python examples/demo.py --ray off)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from rollout_engine.config import ModelSpec
from rollout_engine.models.server_call import tasks_of
from rollout_engine.models.server_process import ServerProcess
from rollout_engine.tasks import read_tasks

TASKS = Path(__file__).parent / "tasks"
MODELS = {"strong": 0.85, "weak": 0.35}
"""Name -> how often the model knows the answer, or how to get it."""


def main() -> int:
    models = {
        name: ModelSpec(
            name=name, kind="scripted", options={"skill": skill, "turns": 2, "latency_ms": 150, "p_500": 0.02}
        )
        for name, skill in MODELS.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder, "tasks.jsonl")
        tasks.write_text((TASKS / "demo.jsonl").read_text() + (TASKS / "sandbox.jsonl").read_text())
        with ServerProcess(models, solutions=tasks_of(read_tasks(tasks)).solutions) as server:
            return run(tasks, Path(folder, "demo"), server.url)


def run(tasks: Path, run_dir: Path, url: str) -> int:
    """What anybody would type."""
    command = ["run", str(tasks), "-k", "8", "-o", str(run_dir), "--agent", "tool_loop"]
    for name in MODELS:
        command += ["-m", f"{name}=openai:{name}@{url}", "-m", f"{name}.seed_header=true"]
    command += sys.argv[1:] or ["--ray", "local"]
    print("$", " ".join(["rollout", *command]), flush=True)
    ended = subprocess.run([sys.executable, "-m", "rollout_engine", *command], check=False).returncode
    if ended == 0:
        subprocess.run([sys.executable, "-m", "rollout_engine", "rewards", str(run_dir)], check=True)
    return ended


if __name__ == "__main__":
    raise SystemExit(main())
