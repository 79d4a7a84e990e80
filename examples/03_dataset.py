"""Questions of a data set, run twice: the second time only those that were neither too easy nor too hard.

    python examples/03_dataset.py

prints the pass rate of each question in the first run, and which of them the second one asks. The answers are compared
as text; `type = "math"` in qa.toml compares them as mathematics (pip install 'rollout-engine[math]').
"""

import tempfile
from pathlib import Path

import rollout_engine
from rollout_engine.qa import qa_tasks, read_spec
from rollout_engine.qafilter import FilterSpec

DATA = Path(__file__).parent / "tasks/qa.toml"
MODEL = {"name": "weak", "kind": "scripted", "options": {"skill": 0.6}}


def main() -> None:
    spec = read_spec(DATA)
    with tempfile.TemporaryDirectory() as folder:
        run = rollout_engine.run(qa_tasks(spec), [MODEL], k=3, ray="off", sandbox="none", run_dir=Path(folder, "a"))
        for row in run.groups.to_pylist():
            print(f"{row['task_id']:8} passes {row['pass_rate']:.0%}")
        fit = FilterSpec(file=str(Path(folder, "a/groups.parquet")), column="pass_rate", min=0.1, max=0.9)
        left = list(qa_tasks(spec.model_copy(update={"filter": (*spec.filter, fit)})))
        print(f"{len(left)} of {len(run.groups)} questions are worth another run:", *[task.task_id for task in left])
        again = rollout_engine.run(left, [MODEL], k=8, seed=1, ray="off", sandbox="none")
        print(f"{again.rollouts.num_rows} rollouts in the second run")


if __name__ == "__main__":
    main()
