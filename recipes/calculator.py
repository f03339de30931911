"""An environment with a tool: sums of three numbers, and a calculator that adds up two of them.

    python recipes/llama_async.py task=environment task.environment=recipes.calculator:Sums \
        task.chat=false task.max_prompt_tokens=16 task.play.max_turns=2 max_new_tokens=32 \
        "generator.stop=['?']" generator.temperature=[1,3] groups_per_step=64 lr=1e-4 \
        loss=reinforce trainer.advantages=turns

The policy reads "12+34+21=". It may ask with "?", which is a call in words of the only tool, then
reads "  46+21=", and has only two numbers to add.
"""

import random


class Sums:
    """A dialogue (docs/data.md) about one sum."""

    def init(self):
        """Draw three numbers, and ask for their sum."""
        self.numbers = [random.randint(10, 33) for _ in range(3)]
        return "+".join(map(str, self.numbers)) + "=", []

    def step(self, message):
        """Add up two numbers if the policy calls the tool; otherwise compare its answer."""
        if "tool_calls" in message:
            first, second, *others = self.numbers
            self.numbers = [first + second, *others]
            asked_well = 0.1 * bool(others)  # not for what is one number by then
            return "  " + "+".join(map(str, self.numbers)) + "=", False, asked_well
        return [], True, float(message["content"] == str(sum(self.numbers)))
