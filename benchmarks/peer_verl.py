"""verl's step times of colocated and of asynchronous jobs, beside the planner's: 8 + 8 GPUs gain
nothing over 16 that take turns, and 16 + 16 to 64 + 64 do.

Published (its pages on the fully asynchronous and on the one-step-off trainer, and its recipes):
Qwen2.5-Math-7B on H20s, 512 prompts of 16 completions (12 where it is one step off), 16
mini-batches a step. Colocated jobs are on all GPUs.

assumed    an H20 by its maker's figures and the H100 sheet's assumptions; prompts of 200 tokens,
           trained on with each completion; lengths with a sigma of 1.2, so that the longest come
           near the most; every microbatch of 20,480 tokens is checkpointed, FSDP over 2 GPUs; 512
           completions a GPU at once on a replica, which is 1 GPU (2 where it is one step off, 4 at
           28 thousand tokens); old log-probabilities are a quarter of the update, and asynchronous
           jobs that stream take the generator's. Not counted: dynamic sampling, what a step takes
           besides sampling, log-probabilities and update, offload, and one sync of weights a step
set        the mean length, on the colocated update; seconds of a layer of a decode step, on the
           colocated sampling (30 us in the sheet; their engine takes several times as long a step).
           Every asynchronous figure is a prediction

In the 8 + 8 table the row that is labelled as colocated looks like another asynchronous job: its
update takes as long as that of half of its GPUs (430 and 436 s), it computes no old
log-probabilities, which all other colocated rows do, and it samples in half of the seconds that are
predicted of 16 H20s. Its validation takes twice as long, which is what the table is about: a switch
of asynchronous jobs that lets the trainer's GPUs validate too. So its no-gain says little; the
planner is held to it as it is labelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from peer_figures import Figure, Verdict, sheet_of, solve

from llamarl.models.config import ModelConfig
from llamarl.planner.costs import Costs
from llamarl.planner.plans import GeneratorPlan, Numerics, TrainerPlan, Work
from llamarl.planner.predict import Predictor
from llamarl.planner.sheet import Assumption, Device, Sheet

QWEN25_7B = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=32768,
    tie_word_embeddings=False,
    attention_bias=True,
)
H20 = Device(
    kind="gpu",
    memory_gib=96,
    flops={"float32": 4.4e13, "bfloat16": 1.48e14, "float16": 1.48e14, "float8": 2.96e14},
    memory_bytes_per_s=4.0e12,
    link_bytes_per_s=4.5e11,
    network_bytes_per_s=5.0e10,
    host_bytes_per_s=5.5e10,
    gpus_per_node=8,
)
VERL_PROMPT = 200
VERL_GROUPS = 512
VERL_MINI_BATCHES = 16
VERL_MICROBATCH = 20480
VERL_SLOTS = 512
VERL_SIGMA = 1.2
FORWARD = 1 / 4  # of a checkpointed forward and backward


@dataclass(frozen=True, slots=True)
class VerlPair:
    """A colocated job of verl and an asynchronous one on as many GPUs. tensor: GPUs a generator's
    replica. colocated: seconds of a step, of its sampling, old log-probabilities and update.
    asynchronous: of its step, its sampling where that is told, and its update. by_batch: whether a
    whole batch is sampled with one version (one step off).
    """

    name: str
    trainer: int
    generator: int
    tensor: int
    group_size: int
    longest: int
    colocated: tuple[float, float, float, float]
    asynchronous: tuple[float, float | None, float]
    by_batch: bool = False
    why: str = ""


_FASTER = (
    "the size is missed, not the sign: verl's trainer on half of the GPUs takes 1.0 to 1.2 times "
    "the colocated update and not twice, and the planner knows no reason; its recipes differ in "
    "offload and in how many samples an update is handed"
)
VERL = (
    VerlPair(
        "8 + 8",
        8,
        8,
        1,
        16,
        10240,
        (484.6, 52.9, 0.0, 430.3),
        (490.0, None, 435.9),
        why="as labelled, half of the GPUs train as fast as all: nothing that the planner models "
        "does this, and the row looks like a second asynchronous job",
    ),
    VerlPair(
        "4 + 12, one step off",
        12,
        4,
        2,
        12,
        20480,
        (749.0, 247.0, 88.0, 286.0),
        (520.0, 458.0, 337.0),
        by_batch=True,
    ),
    VerlPair(
        "16 + 16",
        16,
        16,
        4,
        16,
        28672,
        (790.1, 357.4, 107.7, 269.8),
        (294.8, None, 313.8),
        why=_FASTER,
    ),
    VerlPair(
        "32 + 32",
        32,
        32,
        4,
        16,
        28672,
        (365.3, 150.7, 70.3, 133.4),
        (189.3, None, 157.0),
        why=_FASTER,
    ),
    VerlPair(
        "64 + 64",
        64,
        64,
        4,
        16,
        28672,
        (356.3, 177.9, 53.9, 113.8),
        (150.6, None, 113.2),
        why=_FASTER,
    ),
)


def with_layer(sheet: Sheet, layer_s: float) -> Sheet:
    """Return a sheet with another time of a layer of a decode step."""
    layer = Assumption(layer_s, "set on a colocated job's sampling")
    return replace(sheet, assumptions=replace(sheet.assumptions, decode_layer_s=layer))


def verl_predictor(pair: VerlPair, completion_tokens: float, sheet: Sheet) -> Predictor:
    """Return a predictor of a pair whose completions have so many tokens in the mean."""
    work = Work(
        groups=VERL_GROUPS,
        group_size=pair.group_size,
        prompt_tokens=VERL_PROMPT,
        completion_tokens=completion_tokens,
        longest_prompt=2048,
        max_new_tokens=pair.longest,
        sigma=VERL_SIGMA,
    )
    return Predictor.of(Costs(sheet, QWEN25_7B, Numerics(checkpointing=True)), work)


def verl_update_s(predictor: Predictor, gpus: int) -> float:
    """Return seconds of a step's updates on so many GPUs, one a mini-batch."""
    work = predictor.work
    plan = TrainerPlan(2, gpus // 2, 1, VERL_MICROBATCH)
    completions = work.completions / VERL_MINI_BATCHES / gpus
    tokens = completions * (work.prompt_tokens + work.completion_tokens)
    uneven = predictor.costs.sheet.assumed("imbalance")
    return VERL_MINI_BATCHES * predictor.costs.update_s(completions, tokens * uneven, plan)


def verl_replicas(pair: VerlPair, gpus: int) -> GeneratorPlan:
    """Return a generator of so many GPUs."""
    return GeneratorPlan(pair.tensor, gpus // pair.tensor, VERL_SLOTS * pair.tensor)


def verl_set(pair: VerlPair) -> tuple[Predictor, bool]:
    """Return a predictor with the values that the colocated job sets, and whether one for a layer
    of a decode step was found: there is none where the sheet's own is too slow already.
    """
    gpus = pair.trainer + pair.generator
    sheet = sheet_of(H20)
    _, sampling_s, _, trained_s = pair.colocated

    def update_s(tokens: float) -> float:
        return verl_update_s(verl_predictor(pair, tokens, sheet), gpus)

    tokens = solve(update_s, trained_s, 50.0, float(pair.longest))

    def sample_s(layer_s: float) -> float:
        predictor = verl_predictor(pair, tokens, with_layer(sheet, layer_s))
        return predictor.batch_s(verl_replicas(pair, gpus))

    own_s = sheet.assumed("decode_layer_s")
    if sample_s(own_s) >= sampling_s:
        return verl_predictor(pair, tokens, sheet), False
    layer_s = solve(sample_s, sampling_s, own_s, 1e-2)
    return verl_predictor(pair, tokens, with_layer(sheet, layer_s)), True


def verl_steps(pair: VerlPair, predictor: Predictor) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds by part of the colocated and of the asynchronous step of a pair."""
    gpus = pair.trainer + pair.generator
    update_s = verl_update_s(predictor, gpus)
    sample_s = predictor.batch_s(verl_replicas(pair, gpus))
    logprob_s = update_s * FORWARD if pair.colocated[2] else 0.0
    colocated = {"update": update_s, "logprobs": logprob_s, "sample": sample_s}
    colocated["step"] = update_s + logprob_s + sample_s
    update_s = verl_update_s(predictor, pair.trainer)
    plan = verl_replicas(pair, pair.generator)
    logprob_s = 0.0
    if pair.by_batch:
        sample_s = predictor.batch_s(plan)
        logprob_s = update_s * FORWARD
    else:
        sample_s = predictor.streaming_s(plan, VERL_GROUPS // 2)
    asynchronous = {"update": update_s, "logprobs": logprob_s, "sample": sample_s}
    asynchronous["step"] = max(update_s + logprob_s, sample_s)
    return colocated, asynchronous


def verl_rows() -> tuple[list[Figure], list[Verdict]]:
    """Return verl's figures and what they say."""
    figures = []
    verdicts = []
    for pair in VERL:
        predictor, is_set = verl_set(pair)
        colocated, asynchronous = verl_steps(pair, predictor)
        job = f"{pair.name}: colocated"
        step_s, sampling_s, logprob_s, update_s = pair.colocated
        figures.append(Figure("verl", job, "update", update_s, colocated["update"], True))
        figures.append(Figure("verl", job, "sampling", sampling_s, colocated["sample"], is_set))
        if logprob_s:
            found_s = colocated["logprobs"]
            figures.append(Figure("verl", job, "old log-probabilities", logprob_s, found_s))
        figures.append(Figure("verl", job, "step", step_s, colocated["step"]))
        job = f"{pair.name}: asynchronous"
        later_s, beside_s, update_s = pair.asynchronous
        figures.append(Figure("verl", job, "update", update_s, asynchronous["update"]))
        if beside_s is not None:
            figures.append(Figure("verl", job, "sampling", beside_s, asynchronous["sample"]))
        figures.append(Figure("verl", job, "step", later_s, asynchronous["step"]))
        here = asynchronous["step"] / colocated["step"]
        verdicts.append(Verdict("verl", pair.name, later_s / step_s, here, pair.why))
    return figures, verdicts
