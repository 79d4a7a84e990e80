"""How a rollout of an agent program ended, from all that is known of it. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from rollout_engine.agents.cli.program import Heard
from rollout_engine.errors import AgentError, AgentUnavailable, InfraError, ModelTimeout
from rollout_engine.types import StopReason

Ended: TypeAlias = Literal["exit", "limit", "time", "idle", "failure"]
"""What ended the program: its own exit, a limit of its calls, its time, its silence, a failed model."""
_NOT_STARTED = (126, 127)


class Facts(NamedTuple):
    """What is known of a program that has ended."""

    ended: Ended
    exit_code: int | None
    """None: it was ended."""
    begun: int
    """Model calls of its own."""
    answered: int
    failure: InfraError | None
    limit: StopReason | None
    heard: Heard
    notes: tuple[str, ...] = ()
    log: str = ""
    """The tail of what it printed."""
    out_of_memory: bool = False
    """The kernel killed something of it for memory."""


def ending(facts: Facts) -> StopReason:
    """Why the agent stopped. Raises InfraError where it never had a model to work with."""
    if facts.failure is not None:
        raise facts.failure
    if not facts.answered:
        raise _never_worked(facts)
    if facts.limit is not None and not (facts.limit is StopReason.CONTEXT_OVERFLOW and _went_well(facts)):
        return facts.limit
    if facts.ended in ("time", "idle"):
        return StopReason.AGENT_TIMEOUT
    if _went_well(facts):
        return StopReason.FINISHED
    return StopReason.OUT_OF_MEMORY if facts.out_of_memory else StopReason.AGENT_EXIT


def _went_well(facts: Facts) -> bool:
    """Exit code and event stream agree that the program did what it does; its work is the verifier's to judge."""
    heard = facts.heard
    return facts.ended == "exit" and facts.exit_code == 0 and heard.failed is None and heard.finished is not False


def _never_worked(facts: Facts) -> InfraError:
    tail = "".join(f"; {note}" for note in facts.notes[:3]) + (f": {facts.log}" if facts.log else "")
    if facts.begun and facts.ended in ("time", "idle"):
        return ModelTimeout("the model did not answer the agent program within its time")
    if facts.begun:
        return AgentError(f"the agent program {_how(facts)} before a model call was answered{tail}")
    if facts.exit_code in _NOT_STARTED:
        return AgentUnavailable(f"the agent program could not be started ({facts.exit_code}){tail}")
    return AgentError(f"the agent program {_how(facts)} and made no model call{tail}")


def _how(facts: Facts) -> str:
    if facts.ended == "exit":
        return f"ended with {facts.exit_code}"
    return {"time": "used up its time", "idle": "was idle for too long"}.get(facts.ended, "was ended")
