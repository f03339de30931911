"""NeMo RL's step times of one job in turn and asynchronously, beside the planner's: on 16 GB200s
the asynchronous step is the longer one.

Published (its performance summaries of v0.4 and v0.6, and its recipes): Qwen3 of 30 B parameters,
3.3 B of which a token sees; 64 prompts and 32 completions each; at most 4,096 tokens a sequence,
3,154 to 3,203 in the mean. The synchronous jobs have both sides on all GPUs. The asynchronous ones
split them in half, are one step off, and take weights in while completions run.

assumed    sheets of H100s and GB200s by their makers' figures and the H100 sheet's assumptions; 100
           tokens of a prompt; lengths with a sigma of 0.5; a microbatch is one sequence's 4,096
           tokens; log-probabilities are computed before training, a fourth pass beside three; 256
           slots a GPU. Not counted: refits, the exchange of tokens between experts, pipeline
           bubbles, data-parallel ranks that wait for the one with most to do
set        the trainer's share of the peak, on the synchronous step. The asynchronous one is a
           prediction

Halves of one pool with one recipe take max(2 T, 2 G) where all GPUs in turn take T + G, so that the
planner sees a gain in them only where sampling all at once leaves GPUs waiting for the longest
completions. Where NeMo RL gains more, half of its GPUs train in less than twice the seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from peer_figures import Figure, Verdict, sheet_of, solve

from llamarl.models.config import ModelConfig
from llamarl.planner.costs import Costs
from llamarl.planner.plans import Experts, GeneratorPlan, Numerics, TrainerPlan, Work
from llamarl.planner.predict import Predictor
from llamarl.planner.sheet import Assumption, Device, Sheet

QWEN3_30B_A3B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=8 * 768,  # of the experts that a token sees
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
    attention_bias=False,
)
EXPERTS = Experts(number=128, used=8)
GB200 = Device(
    kind="gpu",
    memory_gib=186,
    flops={"float32": 8.0e13, "bfloat16": 2.5e15, "float16": 2.5e15, "float8": 5.0e15},
    memory_bytes_per_s=8.0e12,
    link_bytes_per_s=9.0e11,
    network_bytes_per_s=5.0e10,
    host_bytes_per_s=2.25e11,
    gpus_per_node=72,
)


@dataclass(frozen=True, slots=True)
class NemoPair:
    """A synchronous and an asynchronous job of NeMo RL on as many GPUs. tokens: of a sequence, in
    the mean, of each. tensor: GPUs a generator's replica, of each; trainer_tensor: that share a
    layer when trained, of each.
    """

    name: str
    device: Device | None  # None: an H100
    gpus: int
    tokens: tuple[int, int]
    tensor: tuple[int, int]
    trainer_tensor: tuple[int, int]
    step_s: tuple[float, float]
    why: str = ""


_LESS_THAN_TWICE = (
    "half of the GPUs train in less than twice the seconds: the asynchronous recipe cuts the model "
    "in another way (a pipeline of 2, which the planner has not), and the synchronous step holds "
    "what only taking turns costs, whose parts are not published"
)
NEMO = (
    NemoPair("16 GB200, v0.6", GB200, 16, (3199, 3197), (1, 1), (1, 1), (221.0, 301.0)),
    NemoPair(
        "32 H100, v0.4",
        None,
        32,
        (3154, 3158),
        (4, 2),
        (2, 1),
        (225.0, 244.0),
        why=_LESS_THAN_TWICE,
    ),
    NemoPair(
        "32 H100, v0.6",
        None,
        32,
        (3203, 3201),
        (2, 2),
        (1, 1),
        (192.0, 152.0),
        why=_LESS_THAN_TWICE,
    ),
)
NEMO_PROMPT = 100
NEMO_GROUPS = 64
NEMO_GROUP_SIZE = 32
NEMO_SEQUENCE = 4096
NEMO_SLOTS = 256
LOGPROB_PASSES = 1 / 3  # of a forward and backward


def with_train(sheet: Sheet, share: float) -> Sheet:
    """Return a sheet with another share of the peak that training reaches."""
    train = Assumption(share, "set on a synchronous step")
    return replace(sheet, assumptions=replace(sheet.assumptions, train_efficiency=train))


def nemo_predictor(sheet: Sheet, tokens: int) -> Predictor:
    """Return a predictor of a job whose sequences have so many tokens in the mean."""
    work = Work(
        groups=NEMO_GROUPS,
        group_size=NEMO_GROUP_SIZE,
        prompt_tokens=NEMO_PROMPT,
        completion_tokens=tokens - NEMO_PROMPT,
        longest_prompt=NEMO_PROMPT,
        max_new_tokens=NEMO_SEQUENCE - NEMO_PROMPT,
        sigma=0.5,
    )
    return Predictor.of(Costs(sheet, QWEN3_30B_A3B, Numerics(), EXPERTS), work)


def nemo_trainer_s(predictor: Predictor, tokens: int, gpus: int, tensor: int) -> float:
    """Return seconds of log-probabilities and training of a step on so many GPUs."""
    ranks = gpus // tensor
    plan = TrainerPlan(1, ranks, tensor, NEMO_SEQUENCE)
    number = predictor.work.completions * tokens / ranks / NEMO_SEQUENCE
    pairs = NEMO_SEQUENCE * tokens / 2
    once = predictor.costs.microbatch_s(NEMO_SEQUENCE, pairs, plan)
    return number * once * (1 + LOGPROB_PASSES)


def nemo_steps(pair: NemoPair, share: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds by part of the synchronous and of the asynchronous step of a pair."""
    sheet = with_train(sheet_of(pair.device), share)
    together = nemo_predictor(sheet, pair.tokens[0])
    tensor = pair.tensor[0]
    plan = GeneratorPlan(tensor, pair.gpus // tensor, NEMO_SLOTS * tensor)
    trainer_s = nemo_trainer_s(together, pair.tokens[0], pair.gpus, pair.trainer_tensor[0])
    sample_s = together.batch_s(plan)
    synchronous = {"train": trainer_s, "sample": sample_s, "step": trainer_s + sample_s}
    apart = nemo_predictor(sheet, pair.tokens[1])
    half = pair.gpus // 2
    tensor = pair.tensor[1]
    plan = GeneratorPlan(tensor, half // tensor, NEMO_SLOTS * tensor)
    trainer_s = nemo_trainer_s(apart, pair.tokens[1], half, pair.trainer_tensor[1])
    sample_s = apart.streaming_s(plan, NEMO_GROUPS) + apart.costs.swap_s(tensor)
    asynchronous = {"train": trainer_s, "sample": sample_s, "step": max(trainer_s, sample_s)}
    return synchronous, asynchronous


def nemo_share(pair: NemoPair) -> float:
    """Return the trainer's share of the peak that the synchronous step sets."""

    def step_s(inverse: float) -> float:
        return nemo_steps(pair, 1 / inverse)[0]["step"]

    return 1 / solve(step_s, pair.step_s[0], 1.0, 1000.0)


def nemo_rows() -> tuple[list[Figure], list[Verdict]]:
    """Return NeMo RL's figures and what they say."""
    figures = []
    verdicts = []
    for pair in NEMO:
        synchronous, asynchronous = nemo_steps(pair, nemo_share(pair))
        first, second = pair.step_s
        both = (
            Figure(
                "NeMo RL", f"{pair.name}, synchronous", "step", first, synchronous["step"], True
            ),
            Figure("NeMo RL", f"{pair.name}, one step off", "step", second, asynchronous["step"]),
        )
        figures += both
        here = asynchronous["step"] / synchronous["step"]
        verdicts.append(Verdict("NeMo RL", pair.name, second / first, here, pair.why))
    return figures, verdicts
