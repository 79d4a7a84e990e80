"""What verifier code gets as `env`: its own sandbox. Standard library only; its text follows that of runner.py."""

import os


class Result:
    """How a command ended. A non-zero exit is a result."""

    def __init__(self, exit_code, stdout, stderr):
        self.exit_code, self.stdout, self.stderr = exit_code, stdout, stderr

    @property
    def ok(self):
        return self.exit_code == 0

    def __repr__(self):
        return f"Result(exit_code={self.exit_code}, stdout={self.stdout!r:.200}, stderr={self.stderr!r:.200})"


class Env:
    """Commands and files of the sandbox that the code runs in. Relative paths are in the workspace."""

    def __init__(self, workdir):
        self.workdir = workdir
        os.chdir(workdir)

    def exec(self, command, *, stdin=None, timeout_s=None, cwd=None, env=None):
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

    def read_file(self, path, *, binary=False):
        """A file's text, or its bytes."""
        with open(self._path(path), "rb") as file:
            data = file.read()
        return data if binary else data.decode(errors="replace")

    def write_file(self, path, data):
        """Writes text or bytes, and makes the parents."""
        where = self._path(path)
        os.makedirs(os.path.dirname(where), exist_ok=True)
        with open(where, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)

    def files(self, pattern="**/*"):
        """The files that match, sorted, as paths relative to the workspace."""
        import glob

        found = glob.glob(pattern, root_dir=self.workdir, recursive=True, include_hidden=True)
        return sorted(path for path in found if os.path.isfile(self._path(path)))

    def exists(self, path):
        return os.path.exists(self._path(path))

    def _path(self, path):
        return os.path.join(self.workdir, path)
