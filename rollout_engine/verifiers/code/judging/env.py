"""What verifier code gets as `env`: the sandbox that it runs in."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # to import `typing` would cost more than all the rest
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class Result:
    """How a command ended. A non-zero exit is a result."""

    def __init__(self, exit_code: int, stdout: str, stderr: str) -> None:
        self.exit_code, self.stdout, self.stderr = exit_code, stdout, stderr

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def __repr__(self) -> str:
        return f"Result(exit_code={self.exit_code}, stdout={self.stdout!r:.200}, stderr={self.stderr!r:.200})"


class Env:
    """Commands and files of the sandbox that the code runs in. Relative paths are in the workspace."""

    def __init__(self, workdir: str) -> None:
        self.workdir = os.path.abspath(workdir)
        os.chdir(self.workdir)

    def exec(
        self,
        command: str | list[str],
        *,
        stdin: str | bytes | None = None,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Runs a command: text by `sh -c`, a list as it is. Raises TimeoutError after killing it."""
        import subprocess

        argv = ["sh", "-c", command] if isinstance(command, str) else [str(part) for part in command]
        data = stdin.encode() if isinstance(stdin, str) else stdin
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL if data is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._path(cwd or "."),
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except FileNotFoundError as error:
            return Result(127, "", f"{error}\n")
        except PermissionError as error:
            return Result(126, "", f"{error}\n")
        with process:
            try:
                out, err = process.communicate(data, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                raise TimeoutError(f"{argv[0]} did not end within {timeout_s} s") from None
        return Result(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))

    def read_file(self, path: str, *, binary: bool = False) -> Any:
        """A file's text, or its bytes."""
        with open(self._path(path), "rb") as file:
            data = file.read()
        return data if binary else data.decode(errors="replace")

    def write_file(self, path: str, data: str | bytes) -> None:
        """Writes text or bytes, and makes the parents."""
        where = self._path(path)
        os.makedirs(os.path.dirname(where), exist_ok=True)
        with open(where, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)

    def files(self, pattern: str = "**/*") -> list[str]:
        """The files that match, sorted, as paths relative to the workspace."""
        import pathlib

        root = pathlib.Path(self.workdir)
        return sorted(str(path.relative_to(root)) for path in root.glob(pattern) if path.is_file())

    def exists(self, path: str) -> bool:
        return os.path.exists(self._path(path))

    def _path(self, path: str) -> str:
        return os.path.join(self.workdir, path)
