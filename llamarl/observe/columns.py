"""The columns of metrics.jsonl: their order in a row, and their meaning.

python -m llamarl.observe > docs/columns.md
"""

from __future__ import annotations

import re
from itertools import chain

# Names, and their meaning, in the order of a row. A name with capitals stands for several columns.
RL = """
step policy_version | the step, and the version of the weights after it
reward/mean reward/std | over the completions that the step used
reward/error_rate | share of completions that could not be scored
eval/reward eval/accuracy | greedy held-out completions; the second if all scores are 0 or 1
eval/errors | samples and greedy completions that could not be scored
eval/left_out eval/left_out_reason | greedy completions without a score; the commonest reason
eval/pass_at_1_sampled eval/pass_at_k | with `eval.num_samples`: mean of a sample; of the best
reward/success eval/success | red-teaming: attacks above `victim.threshold`
eval/gold eval/gold_references | gold scores of completions; of the rows' answers
eval/gold_masked | completions without a gold score
eval/win_rate eval/win_rate_low eval/win_rate_high | gold against the rows' answers; 95 % interval
eval/win_rate_length_controlled | the same at equal lengths
eval/perplexity eval/diversity | with `eval.base`; with `eval.embedder`
eval/length_mean | tokens of held-out completions
eval/NAME/... | all of these for a set of `eval.sets`
loss/value | mean over the updates of the step; a policy-gradient loss need not fall
loss/NAME | an option of the loss that `loss.schedules` changes
grad_norm | before clipping
entropy | nats per token
kl/ref | KL to the reference, nats per token
kl/generator | how off-policy the batch is, nats per token
ratio/mean ratio/max | importance ratio before the cap
ratio/capped_fraction | how often the cap acted
lag/mean lag/max | age in steps of the weights that sampled a completion's oldest token
lag/tokens/0 lag/tokens/1 lag/tokens/2-3 lag/tokens/... | share of trained tokens by lag
value/NAME | with a critic: its loss, error and gradient norm
tokens/trained tokens/generated | trained tokens; all tokens of the step's completions
tokens/deadline_truncated | tokens of completions that a deadline ended
tokens/context tokens/reencode_mismatch | environment tokens; mismatched tokens: 0
victim/tokens | tokens of the victim's replies
completion/length_mean | tokens
completion/truncated_fraction | ended at `max_new_tokens`
completion/deadline_truncated_fraction | ended by a deadline (`on_deadline`); not trained on
dialogues/REASON dialogues/turns | why dialogues ended; their turns
tickets/overcommit | its value; without a bound, groups on their way beyond a batch
tickets/given_back | with `tickets.informative`: groups that were replaced
groups/kept_equal | with `tickets.informative`: groups of equal outcomes that were kept
groups/teaching_fraction | share of groups with different outcomes
groups/filtered | groups that `trainer.filter_groups` left out
buffer/size | different completions that the replay buffer holds
buffer/age_mean buffer/age_max buffer/age_min | their age in steps
buffer/distinct_good | different completions of at least `buffer.good_reward` so far
packing/padding_fraction | share of computed tokens that are padding
packing/unused_budget_fraction | share of a microbatch left empty (free)
moe/load_max | experts: tokens of the most loaded over the mean, a mean over layers
moe/route_diff | with `trainer.routing_replay`: share of routes that it changed
moe/balance_loss | where `config.json` has `output_router_logits`: transformers' loss
parity/logprob_diff_max parity/logprob_diff_rms | trainer against generator, one version
parity/canary_diff_max parity/canary_diff_rms | the same on a fixed prompt
weights/quantization_kl | on that prompt, a quantized generator against the trainer
reward/all_mean | with `tickets.informative`: mean outcome of all groups, replaced ones too
reward/NAME/mean | a part of the reward, before its weight
reward/part/NAME/mean | a part of a mixture
reward/NAME/tokens reward/NAME/seconds | tokens a model read since the last row, and its time
reward/tail_s reference/tail_s | seconds from completion to score
reward/prefilled_early reference/prefilled_early | share of tokens read early
reward/piece_tokens reward/evictions | chunk size; completions that lost their cache slot
reference/version | the version of the newest reference that scored the step's groups
time/wall_s time/evaluated_s | seconds since the start, also at the end of the evaluation
time/step_s time/wait_for_data_s | seconds of the step, and of its wait for groups
generator/tokens_per_s | tokens sampled
generator/idle_fraction trainer/idle_fraction | share of the executor's time
EXECUTOR/idle_fraction/CAUSE | the part of it spent waiting for a cause
trainer/idle_fraction/data | high: raise `max_lag`, then `overcommit`, or add generator ranks
trainer/idle_fraction/weights | high: a generator or reference takes weights slowly
generator/idle_fraction/tickets | high: the trainer is the slow side
generator/idle_fraction/arrivals | without a bound, high: a scorer or victim is slow
weights/publish_stall_s weights/swap_stall_s | how long a version held up trainer and generator
weights/bytes | sent for a version, all links together
"""
SUPERVISED = """
loss/value eval/loss | of a step; of held-out rows
examples/trained tokens/trained | rows or pairs of a step; their trained tokens
lr grad_norm | learning rate; norm before clipping
moe/balance_loss | as above
trainer/tokens_per_s | trained tokens
preference/accuracy eval/accuracy | share of pairs whose chosen one scores higher; held out
preference/margin eval/margin | chosen minus rejected score
preference/score_chosen preference/score_rejected | scores of a step's pairs
eval/score_mean eval/score_std | scores of held-out pairs
eval/calibration_error | expected calibration error
calibration/accuracy/NAME calibration/confidence/NAME | of held-out pairs, by certainty in percent
calibration/pairs/NAME | number of these pairs
eval/perplexity | of held-out answers
"""


def rows_of(table: str) -> list[tuple[list[str], str]]:
    """Return (names, meaning) of the rows of a table."""
    rows = []
    for line in table.strip().splitlines():
        names, _, meaning = line.partition(" | ")
        rows.append((names.split(), meaning))
    return rows


COLUMNS = tuple(chain.from_iterable(names for names, _ in rows_of(RL)))

# All columns that two equal runs may differ in. Whatever belongs to a completion or to the weights
# that sampled it travels with it (llamarl.types.Columns), and so is none of them.
_TIMING = re.compile(
    r"^time/|_per_s$|/idle_fraction|_stall_s$|^reward/.+/(tokens|seconds)$"
    r"|^(reward|reference)/(tail_s|prefilled_early|piece_tokens|evictions)$"
)


def is_timing(name: str) -> bool:
    """Whether a column depends on the clock, or on what was computed at the same time, and so
    differs between two synchronous runs of one seed.
    """
    return _TIMING.search(name) is not None
