"""`rollout run --dry-run`: how many rollouts a run is, and what they may cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rollout_engine.commands import text
from rollout_engine.commands.console import make_console
from rollout_engine.commands.tables import plain_table
from rollout_engine.config import KEY_VARIABLES, ModelSpec, RunConfig
from rollout_engine.specs import Task
from rollout_engine.tasks import TaskFile

CHARS_PER_TOKEN = 4
"""English text and code, roughly; the server counts for real."""


@dataclass(frozen=True, slots=True)
class ModelForecast:
    """One model's part. Costs are of one call per rollout; None where the model names no price or no limit."""

    model: str
    kind: str
    server: str | None
    rollouts: int
    prompt_tokens: int
    max_completion_tokens: int | None
    prompt_usd: float | None
    max_usd: float | None


@dataclass(frozen=True, slots=True)
class Forecast:
    tasks: TaskFile
    k: int
    agent: str
    sandbox: str
    ray: str
    models: list[ModelForecast]

    @property
    def rollouts(self) -> int:
        return sum(model.rollouts for model in self.models)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rollouts": self.rollouts}


def forecast(config: RunConfig, found: TaskFile, tasks: Iterable[Task]) -> Forecast:
    """Reads the tasks once more for the length of their prompts."""
    chars = sum(_chars(task) for task in tasks)
    prompt_tokens = round(chars / CHARS_PER_TOKEN) * config.k
    models = [_model(model, config, found.count * config.k, prompt_tokens) for model in config.models]
    sandbox = config.sandbox if found.sandboxed else "none"
    return Forecast(found, config.k, config.agent, sandbox, config.ray, models)


def _chars(task: Task) -> int:
    return sum(len(str(message.get("content") or "")) for message in task.messages())


def _model(model: ModelSpec, config: RunConfig, rollouts: int, prompt_tokens: int) -> ModelForecast:
    completion = model.max_tokens * rollouts if model.max_tokens is not None else None
    prompt_usd = _usd(prompt_tokens, model.price_prompt)
    completion_usd = _usd(completion, model.price_completion)
    return ModelForecast(
        model=model.name,
        kind=model.kind,
        server=", ".join(model.urls) or model.file,
        rollouts=rollouts,
        prompt_tokens=prompt_tokens,
        max_completion_tokens=completion,
        prompt_usd=prompt_usd,
        max_usd=None if completion_usd is None else completion_usd + (prompt_usd or 0.0),
    )


def _usd(tokens: int | None, price: float | None) -> float | None:
    return None if tokens is None or price is None else tokens * price / 1e6


def print_forecast(found: Forecast) -> None:
    console, tasks = make_console(), found.tasks
    of = "" if tasks.count == tasks.total else f" of {text.whole(tasks.total)}"
    console.print(
        f"{text.whole(tasks.count)}{of} tasks × {text.plural(len(found.models), 'model')} × "
        f"{text.plural(found.k, 'attempt')} = {text.plural(found.rollouts, 'rollout')}"
    )
    console.print(f"agent {found.agent}, sandbox {found.sandbox} ({_sandboxed(tasks)}), ray {found.ray}")
    console.print()
    table = plain_table(
        ("model", "left"), ("kind", "left"), ("where", "left"), "rollouts", "prompt tokens", "completion tokens", "cost"
    )
    for model in found.models:
        table.add_row(
            model.model,
            model.kind,
            model.server or text.MISSING,
            text.whole(model.rollouts),
            f"≈ {text.short(model.prompt_tokens)}",
            _at_most(model.max_completion_tokens, text.short),
            _cost(model),
        )
    console.print(table)
    console.print()
    for line in _remarks(found):
        console.print(line)


def _sandboxed(tasks: TaskFile) -> str:
    return f"{text.plural(tasks.sandboxed, 'task')} need{'s' if tasks.sandboxed == 1 else ''} one"


def _at_most(value: Any, form: Any) -> str:
    return text.MISSING if value is None else f"≤ {form(value)}"


def _cost(model: ModelForecast) -> str:
    if model.max_usd is not None:
        return f"≤ {text.money(model.max_usd)}"
    return text.MISSING if model.prompt_usd is None else f"{text.money(model.prompt_usd)} + completions"


def _remarks(found: Forecast) -> list[str]:
    lines = []
    known = [model.max_usd for model in found.models if model.max_usd is not None]
    paid = [model for model in found.models if model.kind in KEY_VARIABLES]
    if known:
        lines.append(
            f"At most {text.money(sum(known))} in all, with one call per rollout; "
            f"prompts are guessed at {CHARS_PER_TOKEN} characters a token."
        )
    unbounded = [model.model for model in paid if model.max_completion_tokens is None]
    if unbounded:
        lines.append(
            f"Nothing bounds the completions of {', '.join(unbounded)}: -m {unbounded[0]}.max_tokens=1024 would."
        )
    unpriced = [model.model for model in paid if model.prompt_usd is None and model.max_usd is None]
    if unpriced:
        lines.append(
            f"No price is known for {', '.join(unpriced)}: -m {unpriced[0]}.price_prompt=2.5 (USD per million tokens)."
        )
    lines.append("Nothing was started and nothing written (--dry-run).")
    return lines
