"""A run's config from what its caller gave, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_engine.agents import make_agent
from rollout_engine.config import ModelSpec, RunConfig, api_keys, log_level
from rollout_engine.errors import InputError
from rollout_engine.models import check_model
from rollout_engine.sandboxes import check_options


def make_config(
    config: RunConfig | None, models: Sequence[ModelSpec | Mapping[str, Any]] | None, options: Mapping[str, Any]
) -> RunConfig:
    """The config with what was given apart from it. Raises InputError naming the field."""
    from pydantic import ValidationError

    fields = config.model_dump(exclude_unset=True) if config is not None else {}
    if models is not None:
        fields["models"] = [model.model_dump() if isinstance(model, ModelSpec) else model for model in models]
    try:
        return RunConfig.model_validate({**fields, **options})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(first["msg"], where=where, fix="see rollout_engine.config.RunConfig for the fields") from error


def check_config(config: RunConfig, keys: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """All that can be checked before a run starts. Returns the API keys; raises InputError."""
    if not config.models:
        raise InputError("a run needs at least one model", where="models", fix="-m NAME=KIND:..., or models=[...]")
    for model in config.models:
        check_model(model)
    for asked in config.judges.values():
        try:
            check_model(asked)
        except InputError as error:
            where = error.where.replace(f"models.{asked.name}", asked.where, 1)
            raise InputError(error.message, where, error.fix) from error
    make_agent(config.agent, config.agent_options)
    check_options(config.sandbox_options)
    log_level(config)
    return api_keys(config.clients) if keys is None else keys
