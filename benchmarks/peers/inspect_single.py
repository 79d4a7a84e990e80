"""The work done by Inspect: a task of `generate()` and the scorer `pattern` with our regex, evaluated by `eval()`.

Runs in the environment `inspect` of envs.py. Settings: `max_connections` and `max_samples` as asked (its parallelism
page: raise both together), no display. By default Inspect also keeps a live database of events and reads the whole
log back at the end; with --lean both are off (`log_realtime=False`, `log_header_only=True`), which is the cheapest
setting that still writes every sample to the log. The log is not synced to the disk. With --mock there is no HTTP: its
own `mockllm` gives the fixed answer, with usage set (without it counts tokens by a download).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cases import case_arguments, scratch
from benchmarks.measure import Meter, emit, result, versions
from benchmarks.work import ANSWER, API_KEY, EXPECTED, MODEL, PATTERN, WARM_UP, question

if TYPE_CHECKING:
    from inspect_ai.model import Model


def mock(n: int) -> Model:
    """A model that gives the fixed answer n times."""
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    def answers() -> Iterator[ModelOutput]:
        for _ in range(n):
            output = ModelOutput.from_content("mockllm/model", ANSWER)
            output.usage = ModelUsage(input_tokens=20, output_tokens=8, total_tokens=28)
            yield output

    return get_model("mockllm/model", custom_outputs=answers(), memoize=False)


def evaluate(url: str | None, n: int, in_flight: int, folder: Path, *, lean: bool) -> tuple[Meter, list[object]]:
    """What one evaluation of n questions cost, and the value of each score as the written log has it."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.log import read_eval_log
    from inspect_ai.model import get_model
    from inspect_ai.scorer import pattern
    from inspect_ai.solver import generate

    samples = [Sample(input=question(index), target=EXPECTED, id=index + 1) for index in range(n)]
    task = Task(dataset=MemoryDataset(samples), solver=generate(), scorer=pattern(PATTERN))
    http = None if url is None else get_model(f"openai-api/stub/{MODEL}", base_url=url, api_key=API_KEY, memoize=False)
    options = {"log_realtime": False, "log_header_only": True, "score_display": False} if lean else {}
    with Meter() as meter:
        (log,) = eval(
            task,
            model=http or mock(n),
            max_connections=in_flight,
            max_samples=in_flight,
            display="none",
            log_dir=str(folder),
            **options,
        )
    written = read_eval_log(log.location)
    return meter, [score.value for sample in written.samples or () for score in (sample.scores or {}).values()]


def main() -> None:
    parser = case_arguments(__doc__)
    parser.add_argument("--lean", action="store_true", help="without the live database and without reading back")
    parser.add_argument("--mock", action="store_true", help="no HTTP: Inspect's own mock model")
    args = parser.parse_args()
    url = None if args.mock else args.url
    with scratch("inspect") as folder:
        os.environ |= {"XDG_DATA_HOME": str(folder / "data"), "XDG_CACHE_HOME": str(folder / "cache")}
        os.chdir(folder)
        for count in (WARM_UP, args.n):
            meter, scores = evaluate(url, count, args.in_flight, folder / f"logs-{count}", lean=args.lean)
            if scores != ["C"] * count:
                raise SystemExit(f"{scores.count('C')} of {count} samples were scored correct ({len(scores)} scores)")
    name = "inspect, lean" if args.lean else "inspect, defaults"
    packages = versions(["inspect-ai", "openai", "httpx"])
    emit(result(name, args.n, args.in_flight, meter, versions=packages))


if __name__ == "__main__":
    main()
