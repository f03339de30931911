"""Words that a setting may have, and names of columns, for the schema of a configuration and for
the code that acts on them. Imports nothing: a command line is checked before torch is loaded.

A set of words is a Literal, which the schema (llamarl/config/schema.py) takes as a type; code that
checks a word by itself takes the tuple of the same words. Where words name functions or classes, as
in llamarl.learning.optim.SCHEDULES, the table is there, and tests/unit/test_keys.py compares it
with the words here.
"""

from __future__ import annotations

from typing import Literal, get_args

DeviceName = Literal["auto", "cpu", "cuda", "mps"]

Advantages = Literal["group_mean", "group_mean_std", "leave_one_out", "turns", "gae"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
Governor = Literal["auto", "oppo", "window"]
Quantized = Literal["none", "fp8", "int8"]

Transport = Literal["auto", "shm", "gloo", "nccl", "cuda_ipc"]
TRANSPORTS = get_args(Transport)

Priority = Literal["softmax", "uniform"]

# What a classifier says about a label, and what it reads.
ClassifierOutput = Literal["logit", "probability", "log_probability"]
ClassifierReads = Literal["completion", "pair"]

START = "start"  # as an embedder: the model that training starts from

JudgeAsk = Literal["score", "reference", "group"]

Pairing = Literal["all", "best_worst", "random"]

Whiten = Literal["none", "rewards", "advantages", "both", "completions"]

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS = get_args(Estimator)

RatioLevel = Literal["token", "sequence", "sequence_mean"]
LEVELS = get_args(RatioLevel)

Normalize = Literal["tokens", "completions", "groups"]
NORMALIZE = get_args(Normalize)

# The numbers about a group in its line of samples.jsonl (llamarl/learning/samples.py), in order:
# the ticket; the least, mean and largest reward; completions that are trained on; the lag of its
# oldest token in steps; whether anything was learned from it.
GROUP_FIELDS = ("ticket", "least", "mean", "most", "trained", "lag", "taught")

# Columns of evaluations and of parts of a reward. The held-out prompts of the task have eval/...; a
# set NAME of eval.sets has eval/NAME/...
OWN = ""  # the name of the task's own set
# What follows eval/ in the columns of the task's own, and so is no set's name.
OWN_COLUMNS = (
    "accuracy",
    "diversity",
    "errors",
    "gold",
    "gold_masked",
    "gold_references",
    "left_out",
    "left_out_reason",
    "length_mean",
    "pass_at_1_sampled",
    "pass_at_k",
    "perplexity",
    "reward",
    "success",
    "win_rate",
    "win_rate_high",
    "win_rate_length_controlled",
    "win_rate_low",
)
_PREFIX = "eval/"


def part_column(name: str) -> str:
    """Return the column of a reward's part: what it gave, before its weight."""
    return f"reward/{name}/mean"


def column_of(name: str, column: str) -> str:
    """Return the column of a set for what the task's own prompts have as "eval/..."."""
    assert column.startswith(_PREFIX), column
    return f"{_PREFIX}{name}/{column.removeprefix(_PREFIX)}" if name else column
