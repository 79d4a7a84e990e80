"""The documentation runs: Python blocks of the README and the docs, and every example.

One test: .venv/bin/pytest tests/test_docs.py -k README
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import rollout_engine
from rollout_engine.specs import Task
from tests.helpers import make_tasks, scripted

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICK = ["01_run.py", "02_trainer.py", "03_dataset.py"]
"""Examples that need nothing but the package."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in runs/a, where the documentation speaks of one."""
    folder = tmp_path_factory.mktemp("docs")
    models = [scripted("strong", skill=0.9), scripted("weak", skill=0.4)]
    rollout_engine.run(make_tasks(3), models, k=2, ray="off", sandbox="none", run_dir=folder / "runs" / "a")
    return folder


@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))], ids=str
)
def test_a_python_block_runs_as_it_stands(page: Path, number: int, place: Path) -> None:
    script = place / "block.py"
    script.write_text(blocks(page, "python")[number])
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_task_of_the_readme_is_a_task() -> None:
    for block in blocks(ROOT / "README.md", "json"):
        assert Task.model_validate_json(block).answer


def test_a_run_filters_the_tasks_of_the_next_one_as_the_page_says(tmp_path: Path) -> None:
    (script,) = blocks(ROOT / "docs/cli.md", "sh")
    for name in ("qa.toml", "qa.jsonl"):
        shutil.copy(ROOT / "examples/tasks" / name, tmp_path)
    whole = f'set -e\nrollout() {{ {sys.executable} -m rollout_engine "$@"; }}\n{script}'
    done = subprocess.run(["sh", "-c", whole], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    first = pq.read_table(tmp_path / "runs/first/rewards.parquet").to_pylist()
    second = pq.read_table(tmp_path / "runs/second/rewards.parquet").to_pylist()
    kept = {row["task_id"] for row in first if row["learnability"] >= 0.05}
    assert {row["task_id"] for row in second} == kept
    assert 0 < len(kept) <= len(first)


@pytest.mark.parametrize("example", QUICK)
def test_an_example_runs(example: str) -> None:
    script = ROOT / "examples" / example
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_examples_are_short() -> None:
    assert all(len(path.read_text().splitlines()) < 60 for path in (ROOT / "examples").glob("*.py"))


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_no_committed_text_names_a_registry_or_a_path_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    words = (
        "pypi" + ".org",
        "pythonhosted" + ".org",
        "registry." + "npmjs",
        "/wo" + "rk/main",
        os.path.expanduser("~/.py"),
    )
    found = [
        f"{name}: {word}"
        for name in listed
        if name and (ROOT / name).is_file()
        for word in words
        if word in (ROOT / name).read_text(errors="ignore")
    ]
    assert not found
