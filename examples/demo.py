"""The main job end to end: bundled tasks, two scripted models behind real HTTP servers, on Ray, with the reward table.

make demo          (or: python examples/demo.py --ray off)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from rollout_engine.config import ModelSpec
from rollout_engine.models.server_process import ServerProcess
from rollout_engine.tasks import read_tasks

TASKS = Path(__file__).parent / "tasks" / "demo.jsonl"
MODELS = {"strong": 0.85, "weak": 0.35}
"""Name -> how often the model knows the answer."""


def main() -> int:
    models = {
        name: ModelSpec(name=name, kind="scripted", options={"skill": skill, "latency_ms": 150, "p_500": 0.02})
        for name, skill in MODELS.items()
    }
    solutions = {task.task_id: task.answer or "" for task in read_tasks(TASKS)}
    with ServerProcess(models, solutions=solutions) as server, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rollout_engine", "run", str(TASKS), "-k", "8", "-o", f"{folder}/demo"]
        for name in models:
            command += ["-m", f"{name}=openai:{name}@{server.url}", "-m", f"{name}.seed_header=true"]
        command += sys.argv[1:] or ["--ray", "local"]
        print("$", " ".join(["rollout", *command[3:]]), flush=True)
        ended = subprocess.run(command, check=False).returncode
        if ended == 0:
            subprocess.run([sys.executable, "-m", "rollout_engine", "rewards", f"{folder}/demo"], check=True)
        return ended


if __name__ == "__main__":
    raise SystemExit(main())
