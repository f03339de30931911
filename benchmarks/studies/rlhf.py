"""What Asynchronous RLHF claims (arXiv 2410.18252), and Gao et al. 2022 before it, on the synthetic
TL;DR of recipes/rlhf.py, whose gold is a program.
"""

from __future__ import annotations

from study_terms import (
    After,
    Arm,
    Check,
    Constant,
    Fall,
    Last,
    LookOfHighest,
    Minus,
    Question,
    Study,
    When,
)

PAPER = "Async RLHF"
GOLD = "eval/gold"
PROXY = "eval/reward"
WIN_RATE = "eval/win_rate"
PERPLEXITY = "eval/perplexity"
SEEDS = (0, 1, 2)
COMPLETIONS = 128  # a minibatch
UPDATES = 128
AT = 1.25  # the perplexity at which win rates are compared
PIPELINE = (
    "`python recipes/rlhf.py out=PIPELINE` makes the models (ten minutes), and `--given "
    "pipeline=PIPELINE` names them: a policy and a scorer of 0.8 M parameters."
)
LARGER = (
    "`python recipes/rlhf.py out=LARGER data.width=256` makes models of 3.1 M parameters, and "
    "`--given larger=LARGER` names them."
)
OF_RLOO = (
    "The paper has Online DPO here, which it finds to lose the least by minibatches; RLOO has more "
    "to lose."
)
COMMON = (
    "threads=1",
    "checkpoint.every=32",
    "model=hf",
    "model.path={pipeline}/sft",
    "model.dtype=float32",
    "reward=model",
    "reward.path={pipeline}/reward_model",
    "reference=frozen",
    "task=jsonl",
    "task.path={pipeline}/teacher.jsonl",
    "task.eval_path={pipeline}/teacher_held_out.jsonl",
    "task.answer_key=completion",
    "task.chat=false",
    "task.max_prompt_tokens=80",
    "max_new_tokens=32",
    "temperature=0.7",
    "eval.gold=llamarl.tasks.facts:gold",
    "eval.reference_key=completion",
    "eval.num_prompts=500",
    "eval.base={pipeline}/sft",
)
# Table 4: the KL in the reward, and a penalty where the end is missing.
TABLE_4 = ("trainer.reward_kl_coef=0.05", "trainer.missing_eos_penalty=-1")
CRITIC = (
    "trainer.advantages=gae",
    "trainer.whiten=advantages",
    "trainer.critic.trunk=own",
    "trainer.critic.path={pipeline}/reward_model",
)


def updates(loss: str, *, minibatches: int = 1, rate: str = "2e-5") -> tuple[str, ...]:
    """Return the words of UPDATES updates of a loss, looked at every 4, or once a step."""
    size = 1 if loss == "ppo" else 2
    own = CRITIC if loss == "ppo" else ()
    shaped = () if loss == "online_dpo" else TABLE_4
    return (
        f"loss={loss}",
        *own,
        *shaped,
        f"group_size={size}",
        f"groups_per_step={COMPLETIONS * minibatches // size}",
        f"trainer.minibatches_per_step={minibatches}",
        f"max_steps={UPDATES // minibatches}",
        f"eval.every={max(1, 4 // minibatches)}",
        f"lr={rate}",
    )


def at_equal_perplexity(arm: str) -> When:
    return When(arm, WIN_RATE, PERPLEXITY, AT)


def before_the_peak(arm: str) -> Check:
    return Check("several looks lie before the peak", LookOfHighest(arm, WIN_RATE), "above", 3)


COEFS = ("0", "0.02", "0.05", "0.2", "0.5")

rlhf_kl = Study(
    name="rlhf_kl",
    paper=PAPER,
    section="2.1",
    title="KL bounds over-optimisation",
    claim="a policy that goes on against a reward model loses gold while the score still rises "
    "(Gao et al. 2022), and the KL in the reward, 0.05 of it as in table 4, bounds that.",
    refuted_by="a fall of gold of at most 0.05 without KL, or one that 0.05 of KL lessens by at "
    "most 0.05.",
    arms=tuple(Arm(f"KL {coef}", (f"trainer.reward_kl_coef={coef}",)) for coef in COEFS),
    questions=(
        Question(
            name="fall of gold without KL",
            left=Fall("KL 0", GOLD),
            right=Constant(0.0),
            expect="more",
            margin=0.05,
            unit="gold",
            form=".3f",
        ),
        Question(
            name="fall of gold, KL 0.05 less none",
            left=Fall("KL 0.05", GOLD),
            right=Fall("KL 0", GOLD),
            expect="less",
            margin=0.05,
            unit="gold",
            form=".3f",
        ),
        Question(
            name="fall of gold, KL 0.5 less none",
            left=Fall("KL 0.5", GOLD),
            right=Fall("KL 0", GOLD),
            expect="less",
            margin=0.05,
            unit="gold",
            form=".3f",
            decides=False,
        ),
    ),
    checks=(
        Check("gold has risen before", LookOfHighest("KL 0", GOLD), "above", 0),
        Check("the score rises to the end", Fall("KL 0", PROXY), "below", 0.05),
    ),
    seeds=SEEDS,
    common=(
        *COMMON,
        "loss=rloo",
        "group_size=2",
        "groups_per_step=64",
        "max_lag=0",
        "max_steps=128",
        "eval.every=8",
        "lr=1e-4",
    ),
    minutes=25,
    y=GOLD,
    given=("pipeline",),
    shown=(PROXY, WIN_RATE, PERPLEXITY, "kl/ref"),
    remarks=(PIPELINE,),
)

N = (1, 4, 16)

rlhf_on_policy = Study(
    name="rlhf_on_policy",
    paper=PAPER,
    section="3.1, 3.2",
    title="The win rate is highest on-policy",
    claim="with more minibatches on one policy's samples PPO has a lower win rate at the same "
    "perplexity, and after as many updates.",
    refuted_by="a win rate of N = 1 that is at most 2 points above that of N = 16.",
    arms=tuple(Arm(f"N = {n}", updates("ppo", minibatches=n)) for n in N),
    questions=(
        Question(
            name=f"win rate at a perplexity of {AT}, N 1 less N 16",
            left=at_equal_perplexity("N = 1"),
            right=at_equal_perplexity("N = 16"),
            expect="more",
            margin=2,
            unit="points",
            times=100,
        ),
        Question(
            name="win rate after 128 updates, N 1 less N 16",
            left=Last("N = 1", WIN_RATE),
            right=Last("N = 16", WIN_RATE),
            expect="more",
            margin=2,
            unit="points",
            times=100,
            decides=False,
        ),
    ),
    checks=(
        before_the_peak("N = 1"),
        Check("the policy moves", Last("N = 1", PERPLEXITY), "above", AT),
    ),
    seeds=SEEDS,
    common=(*COMMON, "max_lag=0"),
    minutes=20,
    x=PERPLEXITY,
    y=WIN_RATE,
    given=("pipeline",),
    shown=(PERPLEXITY, GOLD),
    remarks=(PIPELINE,),
)

ROBUST = ("ppo", "rloo", "online_dpo")


def on_and_off_policy(name: str, loss: str, *words: str) -> tuple[Arm, Arm]:
    """Return two arms: a minibatch for each policy's samples, and 16 of them."""
    return (
        Arm(f"{name}, N = 1", (*updates(loss), *words)),
        Arm(f"{name}, N = 16", (*updates(loss, minibatches=16), *words)),
    )


def cost_of_minibatches(name: str) -> Minus:
    """Return what 16 of them cost the two arms of that name."""
    return Minus(at_equal_perplexity(f"{name}, N = 1"), at_equal_perplexity(f"{name}, N = 16"))


rlhf_dpo = Study(
    name="rlhf_dpo",
    paper=PAPER,
    section="3.3",
    title="Online DPO is the most robust",
    claim="16 minibatches on one policy's samples cost Online DPO less of its win rate at the same "
    "perplexity than PPO and RLOO.",
    refuted_by="a cost to Online DPO that is at most 2 points less than PPO's, or than RLOO's.",
    arms=(
        *(Arm(f"{loss}, N = 1", updates(loss)) for loss in ROBUST),
        *(Arm(f"{loss}, N = 16", updates(loss, minibatches=16)) for loss in ROBUST),
    ),
    questions=tuple(
        Question(
            name=f"cost of N = 16, Online DPO less {loss}",
            left=cost_of_minibatches("online_dpo"),
            right=cost_of_minibatches(loss),
            expect="less",
            margin=2,
            unit="points",
            times=100,
        )
        for loss in ("ppo", "rloo")
    ),
    checks=tuple(before_the_peak(f"{loss}, N = 1") for loss in ROBUST),
    seeds=SEEDS,
    common=(*COMMON, "max_lag=0"),
    minutes=40,
    x=PERPLEXITY,
    y=WIN_RATE,
    given=("pipeline",),
    shown=(PERPLEXITY, GOLD),
    remarks=(PIPELINE,),
)


def of_policy(given: str) -> tuple[str, ...]:
    """Return words whose policy is that of a given pipeline."""
    return (f"model.path={{{given}}}/sft", f"eval.base={{{given}}}/sft")


def minibatches_cost(name: str) -> Check:
    """Return the check of whether there is a cost that a larger model could lessen."""
    return Check("16 minibatches cost the smaller one", cost_of_minibatches(name), "above", 0.02)


rlhf_sizes = Study(
    name="rlhf_sizes",
    paper=PAPER,
    section="3.4",
    title="Larger policies are more robust",
    claim="16 minibatches on one policy's samples cost a policy of 3.1 M parameters less of its "
    "win rate than one of 0.8 M, against the same reward model.",
    refuted_by="a cost to the larger one that is at most 2 points less.",
    arms=(
        *on_and_off_policy("pipeline", "rloo", *of_policy("pipeline")),
        *on_and_off_policy("larger", "rloo", *of_policy("larger")),
    ),
    questions=(
        Question(
            name="cost of N = 16, 3.1 M less 0.8 M",
            left=cost_of_minibatches("larger"),
            right=cost_of_minibatches("pipeline"),
            expect="less",
            margin=2,
            unit="points",
            times=100,
        ),
    ),
    checks=(
        before_the_peak("larger, N = 1"),
        before_the_peak("pipeline, N = 1"),
        minibatches_cost("pipeline"),
    ),
    seeds=SEEDS,
    common=(*COMMON, "max_lag=0"),
    minutes=40,
    x=PERPLEXITY,
    y=WIN_RATE,
    given=("pipeline", "larger"),
    shown=(PERPLEXITY, GOLD),
    remarks=(
        PIPELINE,
        LARGER,
        OF_RLOO,
        "`rlhf_scorers` asks the same of reward models of both sizes.",
    ),
)


rlhf_scorers = Study(
    name="rlhf_scorers",
    paper=PAPER,
    section="3.4",
    title="Larger reward models are not more robust",
    claim="16 minibatches on one policy's samples cost a policy of 0.8 M parameters as much of its "
    "win rate against a reward model of 3.1 M parameters as against one of 0.8 M.",
    refuted_by="a cost that differs by over 4 points.",
    arms=(
        *on_and_off_policy("0.8 M", "rloo", "reward.path={pipeline}/reward_model"),
        *on_and_off_policy("3.1 M", "rloo", "reward.path={larger}/reward_model"),
    ),
    questions=(
        Question(
            name="cost of N = 16, scorer of 3.1 M less 0.8 M",
            left=cost_of_minibatches("3.1 M"),
            right=cost_of_minibatches("0.8 M"),
            expect="same",
            margin=4,
            unit="points",
            times=100,
        ),
    ),
    checks=(
        before_the_peak("0.8 M, N = 1"),
        before_the_peak("3.1 M, N = 1"),
        minibatches_cost("0.8 M"),
    ),
    seeds=SEEDS,
    common=(*COMMON, "max_lag=0"),
    minutes=40,
    x=PERPLEXITY,
    y=WIN_RATE,
    given=("pipeline", "larger"),
    shown=(PERPLEXITY, GOLD),
    remarks=(PIPELINE, LARGER, OF_RLOO),
)

T = (1, 2, 3)
FRESH = (3, 4, 5, 6, 7)
# On this task every run comes to the same win rate, 0.955, within some twenty updates: what its
# policy answers greedily. Only before that can a setting win more than another.
ALL_ARRIVE = (
    "Announced anew: the earlier page, of {page}, compares runs after all had come to the same win "
    "rate, where nothing could differ. Here the slower arm still rises when it ends."
)


def still_rises(arm: str, looks: int) -> Check:
    """Return the check that the last of a run's looks is its best."""
    value = LookOfHighest(arm, WIN_RATE)
    return Check("the slower arm still rises when it ends", value, "above", looks - 1)


rlhf_passes = Study(
    name="rlhf_passes",
    paper=PAPER,
    section="4.1",
    title="More passes win more, at a higher KL",
    claim="an idle trainer that makes T = 2 or 3 passes over a batch has a higher win rate at "
    "equal episodes, at a higher KL.",
    refuted_by="a win rate of T = 2 after 8 steps that is at most 2 points above that of T = 1.",
    arms=tuple(Arm(f"T = {t}", (f"trainer.updates_per_batch={t}",)) for t in T),
    questions=(
        Question(
            name="win rate, T 2 less T 1",
            left=Last("T = 2", WIN_RATE),
            right=Last("T = 1", WIN_RATE),
            expect="more",
            margin=2,
            unit="points",
            times=100,
        ),
        Question(
            name="perplexity, T 2 less T 1",
            left=Last("T = 2", PERPLEXITY),
            right=Last("T = 1", PERPLEXITY),
            expect="more",
            margin=0.01,
            unit="perplexity",
            form=".3f",
        ),
        Question(
            name="perplexity where 0.88 are won, T 2 less T 1",
            left=When("T = 2", PERPLEXITY, WIN_RATE, 0.88),
            right=When("T = 1", PERPLEXITY, WIN_RATE, 0.88),
            expect="same",
            margin=0.01,
            unit="perplexity",
            form=".3f",
            decides=False,
        ),
    ),
    checks=(still_rises("T = 1", 4),),
    seeds=FRESH,
    common=(*COMMON, *updates("online_dpo"), "max_lag=1", "max_steps=8", "eval.every=2"),
    minutes=12,
    y=WIN_RATE,
    given=("pipeline",),
    shown=(PERPLEXITY, GOLD),
    remarks=(ALL_ARRIVE.format(page="three seeds of 32 steps"), PIPELINE),
)

rlhf_samples = Study(
    name="rlhf_samples",
    paper=PAPER,
    section="4.2",
    title="K = 4 samples need half the steps",
    claim="an idle generator that samples K = 4 completions a prompt, of which best and worst are "
    "trained on, has the win rate of K = 2 in half the steps.",
    refuted_by="a win rate of K = 4 after 6 steps that is over 2 points below that of K = 2 "
    "after 12.",
    arms=(
        Arm("K = 2", ("group_size=2", "max_steps=12")),
        Arm("K = 4", ("group_size=4", "max_steps=12")),
    ),
    questions=(
        Question(
            name="win rate, K 4 after 6 steps less K 2 after 12",
            left=After("K = 4", WIN_RATE, 6),
            right=After("K = 2", WIN_RATE, 12),
            expect="more",
            margin=-2,
            unit="points",
            times=100,
        ),
        Question(
            name="win rate after 12 steps, K 4 less K 2",
            left=After("K = 4", WIN_RATE, 12),
            right=After("K = 2", WIN_RATE, 12),
            expect="more",
            margin=0,
            unit="points",
            times=100,
            decides=False,
        ),
    ),
    checks=(still_rises("K = 2", 6),),
    seeds=FRESH,
    common=(*COMMON, *updates("online_dpo"), "max_lag=1", "eval.every=2"),
    minutes=12,
    y=WIN_RATE,
    given=("pipeline",),
    shown=(PERPLEXITY, GOLD),
    remarks=(ALL_ARRIVE.format(page="three seeds of 16 and 32 steps"), PIPELINE),
)

RLHF = (rlhf_kl, rlhf_on_policy, rlhf_dpo, rlhf_sizes, rlhf_scorers, rlhf_passes, rlhf_samples)
