"""Words that a setting may be, for both the schema of a configuration and the code that acts on
them. Imports nothing, so that a command line is checked before torch is there.

A set of words is a Literal, which the schema (llamarl/config/schema.py) takes as a type; code that
checks a word by itself takes the tuple of the same words. Where words name functions or classes, as
in llamarl.learning.optim.SCHEDULES, the table is there, and tests/unit/test_choices.py compares it
with what is written here.
"""

from __future__ import annotations

from typing import Literal, get_args

Advantages = Literal["group_mean", "group_mean_std", "leave_one_out", "turns", "gae"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
Governor = Literal["auto", "oppo", "window"]
Quantized = Literal["none", "fp8", "int8"]

Transport = Literal["auto", "shm", "gloo", "nccl", "cuda_ipc"]
TRANSPORTS = get_args(Transport)

Priority = Literal["softmax", "uniform"]
PRIORITIES = get_args(Priority)

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
