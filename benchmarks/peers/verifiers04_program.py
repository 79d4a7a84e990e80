"""For verifiers04.py: a taskset whose answers are files, and a harness that runs the tiny agent.

Loaded by verifiers by the module's name. The harness is what its documentation asks of one for a program of one's own:
`launch` runs the program in the rollout's runtime, with the interception server's address and the rollout's secret.
The reward is that of our case: the file that the program left, read from the runtime after it.
"""

from __future__ import annotations

import verifiers.v1 as vf

from benchmarks.tiny_agent import ARGV, FILE
from benchmarks.work import EXPECTED, question

__all__ = ["Questions", "TinyAgent"]


class Question(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """One question, to be answered into a file."""

    @vf.reward
    async def right_file(self, runtime: vf.Runtime) -> float:
        return float((await runtime.read(FILE)).decode().strip() == EXPECTED)


class QuestionsConfig(vf.TasksetConfig):
    """How many questions."""

    count: int = 1


class Questions(vf.Taskset[Question, QuestionsConfig]):
    """The questions of the other cases."""

    def load(self) -> list[Question]:
        data = (vf.TaskData(idx=index, prompt=question(index)) for index in range(self.config.count))
        return [Question(one, self.config.task) for one in data]


class TinyAgent(vf.Harness[vf.HarnessConfig]):
    """The shell script of tiny_agent.py."""

    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        _, prompt = self.resolve_text_prompt(data)
        env = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret, "OPENAI_MODEL": ctx.model}
        return await runtime.run_program([*ARGV, prompt or ""], env)
