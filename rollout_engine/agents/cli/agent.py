"""The agent that is a program: runs it in the rollout's sandbox, answers its model calls, and says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Protocol, cast

from rollout_engine.agents.base import AgentLimits, AgentModel, AgentReport, OnTurn
from rollout_engine.agents.cli.ending import Ended, Facts, ending
from rollout_engine.agents.cli.evidence import evidence, log_of
from rollout_engine.agents.cli.install import Installer, check_directory
from rollout_engine.agents.cli.job import Job, Limits, make_home, put_files
from rollout_engine.agents.cli.options import CliOptions
from rollout_engine.agents.cli.program import MOUNT, Heard, Launch, Program
from rollout_engine.agents.cli.serving import proxied
from rollout_engine.errors import SandboxUnavailable
from rollout_engine.formats.parts import plain_text
from rollout_engine.proxy.roles import AGENT
from rollout_engine.proxy.rollout_session import RolloutSession, SessionLimits
from rollout_engine.proxy.session import Upstream
from rollout_engine.proxy.token import new_token
from rollout_engine.sandboxes.base import JobStatus, Sandbox, SandboxSpec
from rollout_engine.specs import Task
from rollout_engine.types import StopReason
from rollout_engine.waiting import awaiting

EARLY_S, EARLY_SHARE = 2.0, 0.1
"""A program's time ends so much before its rollout's, or by that share of it: so that its last output is kept."""
MAX_RESULT_BYTES = 8 * 2**20
"""A larger result file is not read."""
READ_IN_THREAD_BYTES = 256 * 1024
"""Event streams above this size are not read on the event loop."""


class BoundUpstream(Upstream, Protocol):
    """The rollout's model, as `bound.BoundModel` has it."""

    report: AgentReport

    @property
    def name(self) -> str: ...


class CliAgent:
    """Runs one `Program` for all rollouts of a host."""

    def __init__(self, program: Program, options: CliOptions) -> None:
        self._program, self._options = program, options
        package = program.package
        if package is not None and options.package is not None:
            package = replace(package, names=options.package)
        wanted = package is not None and not options.in_image and options.directory is None
        self._installer = Installer(package, options.cache, options.install_s) if package and wanted else None

    async def equip(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec with the installation in it. Raises AgentError."""
        directory = self._options.directory
        if self._installer is not None:
            directory = await self._installer.directory()
        elif directory is not None:
            await asyncio.to_thread(check_directory, directory, self._program.package)
        return spec if directory is None else replace(spec, mounts=(*spec.mounts, (directory, MOUNT)))

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        if sandbox is None:
            raise SandboxUnavailable("an agent program needs a sandbox and was given none")
        upstream = cast(BoundUpstream, model)
        now = asyncio.get_running_loop().time()
        ends_at = now + limits.agent_s - min(EARLY_S, limits.agent_s * EARLY_SHARE)
        options = self._options
        job_limits = Limits(ends_at, options.idle_s, options.limit_grace_s)
        session = self._session(upstream, limits, on_turn)
        rollout = _Rollout(self._program, options, sandbox, session, upstream)
        return await rollout.run(task, job_limits)

    def _session(self, model: BoundUpstream, limits: AgentLimits, on_turn: OnTurn) -> RolloutSession:
        program, options = self._program, self._options
        allowed = SessionLimits(
            max_turns=limits.max_turns,
            max_tokens=limits.max_tokens,
            max_sub_calls=options.max_sub_calls,
            agent_at_once=options.agent_at_once,
            sub_at_once=options.sub_at_once,
        )
        return RolloutSession(
            model,
            allowed,
            on_turn,
            overrides=options.overrides(),
            rules=(*(option.rule() for option in options.roles), *program.rules(model.name)),
            models=() if program.own_models else (model.name,),
            record_sub=options.record_sub,
        )


class _Rollout:
    """One rollout of a program."""

    def __init__(
        self, program: Program, options: CliOptions, sandbox: Sandbox, session: RolloutSession, model: BoundUpstream
    ) -> None:
        self._program, self._options, self._sandbox = program, options, sandbox
        self._session, self._model = session, model
        self._token = new_token()
        self._ended: Ended = "failure"
        self._heard = Heard()

    async def run(self, task: Task, limits: Limits) -> StopReason:
        prompt = prompt_of(task)
        async with proxied(self._session, self._sandbox, self._options.port, self._token) as url:
            launch = Launch(url, self._model.name, prompt, await make_home(self._sandbox, prompt))
            await put_files(self._sandbox, launch.home, self._program.files(launch))
            job = await self._start(launch)
            try:
                with awaiting(f"agent program {self._program.name}"):
                    self._ended = await job.watch(self._session, limits)
                with awaiting("the last calls of the agent program's helpers"):
                    await self._session.drain(self._options.drain_s if self._ended == "exit" else 0.0)
                self._heard = await self._hear(launch, job.status)
            except BaseException:
                await job.cut()
                raise
            finally:
                self._report(job)
        return ending(self._facts(job))

    async def _start(self, launch: Launch) -> Job:
        program, options = self._program, self._options
        argv = [*self._binary(), *program.command(launch), *(launch.fill(each) for each in options.args)]
        env = {**program.env(launch), **{name: launch.fill(value) for name, value in options.env.items()}}
        return await Job.start(self._sandbox, launch, argv, env, stdin=program.prompt == "stdin")

    def _binary(self) -> tuple[str, ...]:
        program = self._program
        if program.package is None or self._options.in_image:
            return (program.binary,)
        return (*program.interpreter, f"{MOUNT}/{program.package.program()}")

    async def _hear(self, launch: Launch, status: JobStatus) -> Heard:
        result = None
        if self._program.result is not None:
            where = self._program.result
            path = where if where.startswith("/") else f"{launch.home}/{where}"
            with contextlib.suppress(OSError, ValueError):
                result = await self._sandbox.read_file(path, max_bytes=MAX_RESULT_BYTES)
        if len(status.stdout) + len(result or b"") > READ_IN_THREAD_BYTES:
            return await asyncio.to_thread(self._program.hear, status.stdout, result)
        return self._program.hear(status.stdout, result)

    def _facts(self, job: Job) -> Facts:
        session = self._session
        counts = session.counts[AGENT]
        return Facts(
            ended=self._ended,
            exit_code=job.exit_code,
            begun=counts.begun,
            answered=counts.answered,
            failure=session.failure,
            limit=session.limit,
            heard=self._heard,
            notes=tuple(session.notes),
            log=log_of(job.status).replace(self._token, "TOKEN"),
            out_of_memory=job.out_of_memory,
        )

    def _report(self, job: Job) -> None:
        report, facts = self._model.report, self._facts(job)
        report.exit_code, report.final_answer = job.exit_code, self._heard.final
        report.evidence = evidence(
            self._program.name, facts, job.status, self._session, job.seconds, self._options.log_bytes, self._token
        )


def prompt_of(task: Task) -> str:
    """The task as one text: what a program takes."""
    texts = [plain_text(message.get("content")) for message in task.messages()]
    return "\n\n".join(text for text in texts if text)
