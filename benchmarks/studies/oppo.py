"""What OPPO claims (arXiv 2509.25762) of reading ahead and of groups beyond a batch."""

from __future__ import annotations

from study_terms import Arm, Check, Constant, MeanOver, Over, Question, Study, When

SECONDS = "time/wall_s"
STEP_S = "time/step_s"
TAIL = "reward/tail_s"
EARLY = "reward/prefilled_early"
REWARD = "reward/mean"
LENGTH = "completion/length_mean"
LAG = "lag/mean"
MODEL = (
    "`python recipes/fetch_smollm2.py out=MODEL` makes the model, and `--given model=MODEL` names "
    "it."
)
THREE = (
    "placement.trainer=[0]",
    "placement.generator=[1]",
    "placement.reward=[2]",
)
STREAMED = ("reward.stream=true", "reward.piece_tokens=32")
OPPO_RULE = ("max_lag=2", "overcommit=oppo")
WAYS = {
    "none": ("max_lag=0",),
    "intra": ("max_lag=0", *STREAMED),
    "inter": OPPO_RULE,
    "both": (*OPPO_RULE, *STREAMED),
}


def shorter(what: str, column: str, arm: str, base: str, *, decides: bool = True) -> Question:
    """Return whether the seconds of an arm are less than those of another by over 2 % of these."""
    return Question(
        name=f"{what}, {arm} of {base}",
        left=Over(MeanOver(arm, column), MeanOver(base, column)),
        right=Constant(1.0),
        expect="less",
        margin=0.02,
        unit="of it",
        form=".3f",
        decides=decides,
    )


oppo_streaming = Study(
    name="oppo_streaming",
    paper="OPPO",
    section="4.2, fig. 6",
    title="Reading ahead shortens a step",
    claim="a scorer that reads answers while they are sampled makes a step shorter, alone and "
    "beside groups beyond a batch.",
    refuted_by="a step that is not shorter by over 2 % of that without reading ahead.",
    arms=tuple(Arm(name, words, ranks=3) for name, words in WAYS.items()),
    questions=(
        shorter("seconds a step", STEP_S, "intra", "none"),
        shorter("seconds a step", STEP_S, "both", "inter"),
        shorter("seconds a step", STEP_S, "both", "none", decides=False),
        shorter("seconds to a score", TAIL, "intra", "none", decides=False),
    ),
    checks=(
        Check("most is read ahead", MeanOver("intra", EARLY), "above", 0.5),
        Check("something is read ahead", MeanOver("both", EARLY), "above", 0.1),
    ),
    seeds=(0, 1, 2),
    common=(
        "threads=1",
        "model=hf",
        "model.path={warm}",
        "model.dtype=bfloat16",
        "trainer.compute_dtype=bfloat16",
        "reward=model",
        "reward.path={scorer}",
        "task=gsm8k",
        "task.path={train}",
        "loss=rloo",
        "lr=1e-7",
        *THREE,
        "groups_per_step=1",
        "group_size=4",
        "max_new_tokens=96",
        "generator.max_slots=8",
        "max_steps=32",
        "eval.every=0",
        "checkpoint.every=8",
    ),
    minutes=80,
    y=STEP_S,
    given=("warm", "train", "scorer"),
    shown=(TAIL, EARLY, LAG, LENGTH),
    remarks=(
        "The policy and its data are those of `gsm8k`: its greedy answers have 70 tokens in the "
        "mean, of at most 96. A rate of 1e-7 is to keep it as it is, so that answers are "
        "of like lengths in all arms. `python recipes/reward_model.py model.path=MODEL "
        "task.path=PAIRS max_steps=1 out=SCORER` makes the scorer of SmolLM2, from any pairs: "
        "what it says is not asked.",
        "Three ranks on two cores. The arms take turns, seed by seed. It is only worth its time on "
        "a machine that does nothing else.",
    ),
)

RULES = {
    "fixed 0": ("overcommit=0",),
    "fixed 4": ("overcommit=4",),
    "dynamic": ("overcommit=oppo", "governor.window=5"),
}
TARGET = 0.15
OVER = 8  # steps, of 32 completions each


def arrival(rule: str) -> When:
    """Return the seconds after which a rule's completions have TARGET of their sums right."""
    return When(rule, SECONDS, REWARD, TARGET, OVER)


oppo_delta = Study(
    name="oppo_delta",
    paper="OPPO",
    section="4.3, fig. 7a",
    title="A dynamic Δ is as good as the best fixed",
    claim="groups beyond a batch by the trend of the reward come to a reward as soon as the better "
    "of fixed numbers.",
    refuted_by=f"seconds to a reward of {TARGET} that are over a fifth more than those with 4 "
    "groups, or with none.",
    arms=tuple(Arm(name, words, ranks=2) for name, words in RULES.items()),
    questions=tuple(
        Question(
            name=f"seconds to {TARGET}, dynamic of {name}",
            left=Over(arrival("dynamic"), arrival(name)),
            right=Constant(1.0),
            expect="less",
            margin=-0.2,
            unit="of it",
            form=".3f",
        )
        for name in ("fixed 0", "fixed 4")
    ),
    checks=(
        *(
            Check("it is above the target", MeanOver(name, REWARD), "above", TARGET)
            for name in RULES
        ),
        Check("Δ moves", MeanOver("dynamic", "tickets/overcommit"), "above", 0.5),
    ),
    seeds=(0, 1, 2, 3, 4),
    common=(
        "threads=1",
        "model=hf",
        "model.path={model}",
        "model.dtype=bfloat16",
        "trainer.compute_dtype=bfloat16",
        "task=reasoning_gym",
        "task.name=chain_sum",
        "task.options.max_terms=2",
        "task.options.max_digits=2",
        "reward.fn=llamarl.tasks.rewards:numeric_match",
        "max_new_tokens=48",
        "lr=2e-5",
        "max_lag=2",
        "group_size=8",
        "groups_per_step=4",
        "max_steps=44",
        "eval.every=0",
        "checkpoint.every=10",
    ),
    minutes=80,
    y=REWARD,
    given=("model",),
    shown=(SECONDS, LAG, LENGTH, "tickets/overcommit"),
    remarks=(
        MODEL,
        "Answers end by themselves, so that their lengths vary. The reward is that of the "
        "completions that are trained on, in the mean of 8 steps.",
        "Two runs of other seeds were made before. At this rate the means of eight steps each were "
        "0.06, 0.13, 0.14, 0.20, 0.25 and 0.35, with no group beyond a batch; at twice the rate, "
        "with a dynamic Δ, they stayed at 0.2 from step 17 on.",
    ),
)

OPPO = (oppo_streaming, oppo_delta)
