"""What can go wrong, named by the boundary crossed.

RolloutEngineError
  InputError                bad input at the door: says where, what was found, what to do (exit code 2)
  RunError                  a run cannot go on (no hosts left, the disk full); it can be resumed
    StuckError                nothing went forward for a bounded time; says what everything waited for
  LimitReached              the agent met one of its own limits: control flow, never a failure
  InfraError                a wall between us and something outside; becomes `failed`, never a score
    TaskBodyError             the task cannot be built on this host
    ModelError                the model's server
      ModelTimeout ModelConnectionError ModelRateLimited ModelServerError     another try may help
      ModelBadResponse ModelRequestError ModelAuthError ModelRefused ModelMissingAnswer
    SandboxError              the sandbox's provider
      SandboxStartError SandboxDied SandboxUnavailable SandboxAway
        SandboxOutOfMemory        what ran in it, not we, ended it: the agent's own limit
      NodeDiskFull              a disk of the node, not of the sandbox, has no room
    SetupError                the task's own files, setup commands, services or tools
      SetupTimeout            one of them was not done in its time
    AgentError                an agent program that never worked
      AgentUnavailable        it is not there, or not for this machine
    HostError                 the node or the host process
      HostLost                  the driver cannot reach it any more
    DeadlineError             the whole rollout took too long before there was a verdict
  VerifierError             the verifier raised, hung, or returned something unusable: score null
    VerifierTimeout VerifierBadReturn VerifierUnavailable
  ExecTimeout               a command in a sandbox met its limit; carries the partial output
  SandboxFull               the sandbox's own disk is full (an OSError): the agent's own limit
  TooLarge                  more bytes or files than whoever copies allows (a ValueError)
  BadBundle                 an archive that is broken, or would reach out of its own tree (a ValueError)

All pickle: extra fields have defaults. Nothing is classified by its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollout_engine.types import Boundary, ExecResult, Failure, StopReason

MAX_MESSAGE_CHARS = 2_000
"""A failure message in a row keeps this much of its text."""


class RolloutEngineError(Exception):
    """The root of all errors that the engine raises on purpose."""


class InputError(RolloutEngineError):
    """Input that cannot be used. `where` is a file, line or field; `fix` says what to do about it."""

    def __init__(self, message: str, where: str = "", fix: str = "") -> None:
        super().__init__(message, where, fix)
        self.message, self.where, self.fix = message, where, fix

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        return f"{head}\n  {self.fix}" if self.fix else head


class RunError(RolloutEngineError):
    """The run ended early; what was committed is kept and the run can be resumed."""


class StuckError(RunError):
    """Nothing went forward for too long: no row, no turn, no phase, or no row was taken by the disk or the reader."""


class LimitReached(RolloutEngineError):
    """Raised inside an agent when one of its limits is met; the rollout becomes `truncated`."""

    def __init__(self, reason: StopReason = StopReason.AGENT_TIMEOUT) -> None:
        super().__init__(reason)
        self.reason = reason


class InfraError(RolloutEngineError):
    """A fault of something outside. `retryable` says whether the same attempt may be tried afresh."""

    boundary = Boundary.HOST
    retryable = True


class TaskBodyError(InfraError):
    """A task's body does not parse or does not fit this host's version."""

    boundary, retryable = Boundary.TASK, False


class ModelError(InfraError):
    """The model's server could not be used."""

    boundary = Boundary.MODEL


class ModelTimeout(ModelError):
    """No whole answer within the call's limit."""


class ModelConnectionError(ModelError):
    """The connection was refused, cut or never made."""


class ModelRateLimited(ModelError):
    """429, and the client's own retries are used up."""

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class ModelServerError(ModelError):
    """5xx, and the client's own retries are used up."""


class ModelBadResponse(ModelError):
    """The server answered 200 with something that is no completion."""


class ModelRequestError(ModelError):
    """The server refused the request (4xx); the same request would be refused again."""

    retryable = False


class ModelAuthError(ModelError):
    """401 or 403: the key is missing, wrong, or has no access."""

    retryable = False


class ModelRefused(ModelError):
    """The provider's content filter withheld the answer."""

    retryable = False


class ModelMissingAnswer(ModelError):
    """A replay model has no recorded answer for this rollout."""

    retryable = False


class SandboxError(InfraError):
    """A fault of the sandbox's provider; never shown to the model as command output."""

    boundary = Boundary.SANDBOX


class SandboxStartError(SandboxError):
    """The sandbox could not be made."""


class SandboxDied(SandboxError):
    """The sandbox ended by itself, or was killed from outside."""


class SandboxOutOfMemory(SandboxDied):
    """The kernel ended the whole sandbox for the memory that was used in it, by whatever ran there."""


class SandboxUnavailable(SandboxError):
    """The provider itself is not there (no daemon, no permission)."""

    retryable = False


class NodeDiskFull(SandboxError):
    """A disk of the node is full: the place where images, installations, files on their way or temporary ones lie."""


class SandboxAway(SandboxError):
    """The provider was there and does not answer for now: its daemon is being restarted."""


class SetupError(InfraError):
    """A task's files, setup command, service or tool did not come up in its sandbox."""

    boundary, retryable = Boundary.SETUP, False


class SetupTimeout(SetupError):
    """A setup command, service or tool was not done in its time; tried again, as the machine may have been busy."""

    retryable = True


class AgentError(InfraError):
    """An agent program made no model call, or none that was answered."""

    boundary = Boundary.AGENT


class AgentUnavailable(AgentError):
    """An agent program is not there, is for another machine, or cannot be installed: another try finds the same."""

    retryable = False


class HostError(InfraError):
    """The host process or its node failed under the rollout."""


class HostLost(HostError):
    """A host is gone. `process_gone`: known to be dead, so nothing of it runs on behind a partition."""

    def __init__(self, message: str = "", process_gone: bool = False) -> None:
        super().__init__(message, process_gone)
        self.process_gone = process_gone

    def __str__(self) -> str:
        return str(self.args[0])


class DeadlineError(InfraError):
    """The whole-rollout deadline passed before there was a verdict."""

    boundary = Boundary.DEADLINE


class VerifierError(RolloutEngineError):
    """The verifier did not come to a finding: the score is null, and counted apart."""


class VerifierTimeout(VerifierError):
    """The verifier met its limit."""


class VerifierBadReturn(VerifierError):
    """The verifier returned something that is no finite number."""


class VerifierUnavailable(VerifierError):
    """The verifier lacks something that it needs: a package, a judge, an answer of its judge's server."""


class ExecTimeout(RolloutEngineError):
    """A command met its limit. `partial` holds the output until then."""

    def __init__(self, message: str = "", partial: ExecResult | None = None) -> None:
        super().__init__(message, partial)
        self.partial = partial if partial is not None else ExecResult(exit_code=-9)

    def __str__(self) -> str:
        return str(self.args[0])


class SandboxFull(OSError):
    """The sandbox's own disk has no room for what is to be written: what ran in it has filled it."""


class TooLarge(ValueError):
    """A file, a tree or an export has more bytes or files than whoever asked for it allows; nothing of it was kept."""


class BadBundle(ValueError):
    """An archive cannot be read, or names something outside of its own tree; nothing of it was unpacked."""


def clip(text: str) -> str:
    """Bounds a message that goes into a row, and replaces lone surrogates, which no UTF-8 column can hold."""
    text = text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def describe(error: BaseException) -> str:
    """The message for a row, or the type where the message is empty or cannot be made (user code raises anything)."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return clip(text or type(error).__name__)


def failure_of(error: BaseException, boundary: Boundary = Boundary.HOST) -> Failure:
    """The row's form of an error; an untyped one is charged to `boundary` and is worth another try."""
    if isinstance(error, InfraError):
        return Failure(error.boundary, type(error).__name__, describe(error), error.retryable)
    if isinstance(error, VerifierError):
        return Failure(Boundary.VERIFIER, type(error).__name__, describe(error), False)
    return Failure(boundary, type(error).__name__, describe(error), True)


def forget_frames(error: BaseException) -> None:
    """For an error that has become data: the frames that it passed hold the rollout, and often the error itself."""
    chain: list[BaseException] = []
    left: BaseException | None = error
    while left is not None and all(left is not each for each in chain):
        left.__traceback__ = None
        chain.append(left)
        left = left.__cause__ or left.__context__


@contextmanager
def crossing(error_class: type[InfraError], what: str) -> Iterator[None]:
    """Names the wall: typed errors pass through, any other `Exception` becomes `error_class` with its cause."""
    try:
        yield
    except RolloutEngineError:
        raise
    except Exception as error:
        raise error_class(f"{what}: {describe(error)}") from error
