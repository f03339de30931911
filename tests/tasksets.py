"""A taskset of verifiers v1, for tests; it is imported where that package is installed alone."""

from __future__ import annotations

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.nodes[-1].message.content == self.data.answer)

    @vf.reward(weight=0.5)
    async def digits(self, trace) -> float:
        return float(trace.nodes[-1].message.content.isdigit())


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(10, 40):
            yield SumTask(
                SumData(
                    prompt=f"{number}+{number + 7}=",
                    system_prompt="Add up.",
                    answer=str(2 * number + 7),
                ),
                self.config.task,
            )
