"""What cannot go together of what scores, whatever its kind, each with the remedy."""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.config.files import EVAL_SETS
from llamarl.config.rewards import (
    EncoderSourceSettings,
    FunctionSourceSettings,
    JudgeSourceSettings,
    NoveltySourceSettings,
)
from llamarl.config.schema import Config
from llamarl.config.tasks import FileSettings

Rule = tuple[str, bool, str]  # the keys, whether they are wrong, the remedy


def reward_rules(c: Config) -> list[Rule]:
    """Return the rules about what scores: it needs an answer to compare with, and parts."""
    asked: dict[str, object] = {"task": c.task}
    asked |= {f"{EVAL_SETS}.{name}": one for name, one in c.eval.sets.items()}
    unanswered = []
    for section, rows in asked.items():
        if isinstance(rows, FileSettings) and rows.answer_key is None:
            unanswered.append(f"{section}.answer_key")
    rules = []
    for key, part in c.reward_parts.items():
        if isinstance(part, FunctionSourceSettings):
            for answer_key in unanswered:
                what = "the task's own reward compares with an answer; "
                remedy = f"{key}.fn=module:function, or {answer_key}=answer"
                rules.append((f"{answer_key} {key}.fn", part.fn is None, what + remedy))
        elif isinstance(part, JudgeSourceSettings):
            rules += _judge_rules(c, key, part, unanswered=unanswered)
        elif isinstance(part, NoveltySourceSettings):
            what = "embeds whenever a group is whole, whoever has the device; offload=false"
            rules.append((f"{key}.kind offload", c.offload, what))
        elif isinstance(part, EncoderSourceSettings):
            what = "stays on its device and computes at any time; offload=false"
            rules.append((f"{key}.kind offload", c.offload, what))
        elif part.scale == 0:
            rules.append((f"{key}.scale", True, "makes every score the same; any other number"))
    rules.append(
        (
            "reward.kind",
            not c.reward_parts,
            "needs parts: 'reward.parts={rm: {kind: model, path: DIR}}'",
        )
    )
    if c.reward.stream:
        rules += _stream_rules(c)
    return rules


def comparing_judges(c: Config) -> list[str]:
    """The keys of the judges that compare the completions of a prompt."""
    parts = c.reward_parts.items()
    return [
        key for key, part in parts if isinstance(part, JudgeSourceSettings) and part.ask == "group"
    ]


def _stream_rules(c: Config) -> list[Rule]:
    """Return the rules about models that read completions while these are sampled."""
    cache_tokens = c.reward.cache_tokens
    chunk_tokens = c.reward.chunk_tokens
    searches = chunk_tokens == "auto"
    return [
        (
            "reward.chunk_tokens max_lag",
            searches and c.max_lag == 0,
            "takes what a clock says is fastest, and a synchronous run has the same bits whatever "
            "the clock says; a number, null, or max_lag=1",
        ),
        (
            "reward.stream generator.kind",
            c.generator.kind == "vllm",
            "vLLM does not tell what it samples before a completion has ended; "
            "generator=native, or reward.stream=false",
        ),
        (
            "reward.stream reward.kind",
            bool(c.reward_parts) and not c.scorers,
            "no part is a model, and nothing else reads tokens; reward.stream=false",
        ),
        (
            "reward.stream offload",
            c.offload,
            "executors take turns on the device, so that none reads while another samples; "
            "offload=false, or reward.stream=false",
        ),
        (
            "reward.stream victim.kind",
            c.victim.placed,
            "what is scored is the victim's answers, which begin when an attack has ended; "
            "reward.stream=false",
        ),
        (
            "reward.chunk_tokens",
            isinstance(chunk_tokens, int) and chunk_tokens >= c.longest,
            "no completion has as many tokens and one more, so none would be read before it ends; "
            f"at most {c.longest - 1}, or null",
        ),
        (
            "reward.cache_tokens",
            cache_tokens is not None and cache_tokens < c.longest,
            "does not hold one sequence of task.max_prompt_tokens + max_new_tokens; "
            f"need at least {c.longest}, or null",
        ),
    ]


def _judge_rules(
    c: Config, key: str, judge: JudgeSourceSettings, *, unanswered: Sequence[str]
) -> list[Rule]:
    """Return the rules about a judge, its settings under a key, and what it compares.

    unanswered: the keys of answers that are null.
    """
    compares = judge.ask == "group"
    rules = [
        (
            f"{key}.lowest {key}.highest",
            judge.lowest >= judge.highest,
            "leaves no room for a score; lowest is the worst one",
        ),
        (
            f"{key}.ask group_size",
            compares and c.group_size < 2,
            "compares the completions of a prompt; group_size=2 or more",
        ),
        (
            f"{key}.ask eval.num_samples",
            compares and c.is_evaluated and c.eval.num_samples == 0,
            "in an evaluation a greedy completion has none of its prompt to be compared with; "
            f"eval.num_samples=1, eval.every=0, or {key}.ask=reference",
        ),
    ]
    for answer_key in unanswered:
        what = f"compares with the prompt's answer; {answer_key}=answer"
        rules.append((f"{key}.ask {answer_key}", judge.ask == "reference", what))
    return rules
