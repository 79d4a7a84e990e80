"""What a model reads of a command that ran in its sandbox."""

from __future__ import annotations

from rollout_engine.sandboxes.base import MAX_OUTPUT_BYTES
from rollout_engine.types import ExecResult

_KILLED = (-9, 137)
"""As the kernel says it, and as a shell does."""


def shell_output(result: ExecResult) -> bytes:
    """Standard output, standard error, and how it ended."""
    return _joined(result, _ending(result))


def tool_output(result: ExecResult) -> bytes:
    """The same for a tool whose success needs no words."""
    return _joined(result, "" if result.ok and not result.oom else _ending(result))


def cut_output(partial: ExecResult, timeout_s: float) -> bytes:
    """What a command that met its limit had written by then."""
    return _joined(partial, f"[killed: no end within {timeout_s:g} s; the output above is what it wrote until then]")


def _joined(result: ExecResult, ending: str) -> bytes:
    parts = []
    if result.truncated:
        parts.append(b"[a stream wrote more than %d MiB; its beginning is lost]" % (MAX_OUTPUT_BYTES >> 20))
    if result.stdout:
        parts.append(result.stdout.removesuffix(b"\n"))
    if result.stderr:
        parts.append(b"[stderr]\n" + result.stderr.removesuffix(b"\n"))
    if ending:
        parts.append(ending.encode())
    return b"\n".join(parts)


def _ending(result: ExecResult) -> str:
    if result.oom and result.exit_code in _KILLED:
        return "[killed: out of memory]"
    how = f"exit code {result.exit_code}" if result.exit_code >= 0 else f"killed by signal {-result.exit_code}"
    return f"[{how}; out of memory: something in it was killed]" if result.oom else f"[{how}]"
