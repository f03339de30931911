"""What is claimed of old data and of clipping, on additions: LlamaRL (arXiv 2505.24034), TBA
(2503.18929), Async RLHF (2410.18252) and Magistral (2506.10910).
"""

from __future__ import annotations

from study_terms import (
    Arm,
    Check,
    Constant,
    FirstAt,
    Last,
    LookOfHighest,
    MeanOver,
    Minus,
    Question,
    Review,
    Study,
)

ACCURACY = "eval/accuracy"
LAG = "lag/mean"
ENTROPY = "entropy"
SECONDS = "time/wall_s"
GROUPS, SIZE = 16, 8
TEN = tuple(range(10))
BATCH = (
    f"groups_per_step={GROUPS}",
    f"group_size={SIZE}",
    "trainer.microbatch_tokens=1024",
)
ADDITIONS = ("threads=1", "lr=3e-5", "max_steps=64", "eval.every=8")


def lagging(max_lag: int) -> tuple[str, ...]:
    """Return the words of a window that is kept full: the lag is max_lag from step max_lag on."""
    slots = (max_lag + 1) * GROUPS * SIZE + 512
    return (
        f"max_lag={max_lag}",
        f"overcommit={max_lag * GROUPS}",
        f"generator.max_slots={slots}",
    )


CAPS = ("1", "2", "4", "10", "null")


def cap(value: str) -> str:
    return "no cap" if value == "null" else f"cap {value}"


aipo_cap = Study(
    name="aipo_cap",
    paper="LlamaRL",
    section="AIPO",
    title="AIPO's cap steadies old data",
    claim="a cap of 4 on the importance ratio (of 2 to 10 that are named) learns better from data "
    "eight steps old than no cap, and than REINFORCE without ratios.",
    refuted_by="an accuracy of cap 4 that is at most 2 points above that without a cap, or at most "
    "5 above REINFORCE's.",
    arms=(
        *(Arm(cap(value), ("loss=aipo", f"loss.ratio_cap={value}")) for value in CAPS),
        Arm("REINFORCE", ("loss=reinforce",)),
    ),
    questions=(
        Question(
            name="accuracy, cap 4 less no cap",
            left=Last("cap 4", ACCURACY),
            right=Last("no cap", ACCURACY),
            expect="more",
            margin=2,
            unit="points",
            times=100,
        ),
        Question(
            name="accuracy, cap 4 less REINFORCE",
            left=Last("cap 4", ACCURACY),
            right=Last("REINFORCE", ACCURACY),
            expect="more",
            margin=5,
            unit="points",
            times=100,
        ),
        *(
            Question(
                name=f"accuracy, cap {value} less no cap",
                left=Last(f"cap {value}", ACCURACY),
                right=Last("no cap", ACCURACY),
                expect="more",
                margin=2,
                unit="points",
                times=100,
                decides=False,
            )
            for value in ("1", "2", "10")
        ),
    ),
    checks=tuple(
        Check("the data are old", MeanOver(arm, LAG), "above", 6.5)
        for arm in ("cap 4", "no cap", "REINFORCE")
    ),
    seeds=TEN,
    common=(*ADDITIONS, *BATCH, *lagging(8)),
    minutes=25,
    y=ACCURACY,
    shown=(LAG, "ratio/max", "ratio/capped_fraction"),
    review=Review(
        said="a cap can steady only what it caps. Caps of 4 and 10 acted on fewer than 1 % of the "
        "tokens, so that with and without them the runs were nearly the same.",
        checks=(Check("the cap acts", MeanOver("cap 4", "ratio/capped_fraction"), "above", 0.01),),
    ),
)

HOLDING = ("aipo", "tba", "reinforce")


def loss_by_lag(loss: str) -> Minus:
    return Minus(Last(f"{loss}, lag 0", ACCURACY), Last(f"{loss}, lag 8", ACCURACY))


SATURATED = (
    "all arms had come to the same accuracy before they ended, where settings that learn at "
    "different speeds look alike. A run can answer only if its slower arm still rises at its end."
)


def still_rises(arm: str, looks: int) -> Check:
    """Return the check that the last of a run's looks is its best."""
    value = LookOfHighest(arm, ACCURACY)
    return Check("it still rises when it ends", value, "above", looks - 1)


lag_holds = Study(
    name="lag_holds",
    paper="LlamaRL; TBA",
    section="AIPO; 6",
    title="AIPO and TBA hold as lag grows",
    claim="data eight steps old cost AIPO and TBA at least 10 points of accuracy less than they "
    "cost plain REINFORCE.",
    refuted_by="a cost that is at most 10 points less than REINFORCE's.",
    arms=(
        *(Arm(f"{loss}, lag 0", (f"loss={loss}", *lagging(0))) for loss in HOLDING),
        *(Arm(f"{loss}, lag 8", (f"loss={loss}", *lagging(8))) for loss in HOLDING),
    ),
    questions=tuple(
        Question(
            name=f"cost of eight steps, {loss} less REINFORCE",
            left=loss_by_lag(loss),
            right=loss_by_lag("reinforce"),
            expect="less",
            margin=10,
            unit="points",
            times=100,
        )
        for loss in ("aipo", "tba")
    ),
    checks=(
        *(
            Check("the data are old", MeanOver(f"{loss}, lag 8", LAG), "above", 6.5)
            for loss in HOLDING
        ),
        Check("without lag it learns", Last("reinforce, lag 0", ACCURACY), "above", 0.8),
    ),
    seeds=(0, 1, 2, 3, 4),
    common=(*ADDITIONS, *BATCH),
    minutes=12,
    y=ACCURACY,
    shown=(LAG, "ratio/max"),
)

sync_async = Study(
    name="sync_async",
    paper="Async RLHF",
    section="3.5",
    title="Asynchronous learns as synchronous does",
    claim="a step behind, training comes to the accuracy of synchronous training at equal steps.",
    refuted_by="a difference of over 3 points in either direction.",
    arms=(
        Arm("sync", ("max_lag=0", "threads=2")),
        Arm("async", ("max_lag=1", "threads=1"), ranks=2),
    ),
    questions=(
        Question(
            name="accuracy, asynchronous less synchronous",
            left=Last("async", ACCURACY),
            right=Last("sync", ACCURACY),
            expect="same",
            margin=3,
            unit="points",
            times=100,
        ),
        Question(
            name="seconds of 64 steps, asynchronous less synchronous",
            left=Last("async", SECONDS),
            right=Last("sync", SECONDS),
            expect="less",
            margin=0,
            unit="s",
            decides=False,
        ),
    ),
    checks=(
        Check("the data are behind", MeanOver("async", LAG), "above", 0.3),
        Check("it learns", Last("sync", ACCURACY), "above", 0.8),
    ),
    seeds=TEN,
    common=("loss=aipo", "lr=3e-5", "max_steps=64", "eval.every=8", *BATCH),
    minutes=20,
    y=ACCURACY,
    shown=(LAG,),
    remarks=(
        "Synchronous is one process of two threads, not two ranks that wait for each other in "
        "turn. Seconds count only where nothing else ran.",
    ),
    review=Review(said=SATURATED, checks=(still_rises("sync", 8),)),
)

# Magistral 2.1, scaled: its loss, its advantages, its filter.
MAGISTRAL = (
    "threads=1",
    "loss=ppo",
    "loss.normalize=groups",
    "trainer.filter_groups=true",
    "max_lag=1",
    "lr=3e-5",
    f"group_size={SIZE}",
    "trainer.microbatch_tokens=1024",
)
WHITE = "trainer.whiten=completions"
HIGHER = ("loss.clip_low=0.2", "loss.clip_high=0.28")


def minibatches(count: int) -> tuple[str, ...]:
    """Return the words of as many completions, in batches of `count` minibatches of 128."""
    return (
        *HIGHER,
        WHITE,
        f"groups_per_step={GROUPS * count}",
        f"trainer.minibatches_per_step={count}",
        f"max_steps={64 // count}",
        f"eval.every={8 // count}",
    )


FIVE = (0, 1, 2, 3, 4)

magistral_batch = Study(
    name="magistral_batch",
    paper="Magistral",
    section="6.3",
    title="Batch = minibatch learns best",
    claim="at equal completions one update a batch learns better than several minibatches.",
    refuted_by="an accuracy of N = 1 that is at most 2 points above that of N = 4.",
    arms=tuple(Arm(f"N = {n}", minibatches(n)) for n in (1, 2, 4)),
    questions=(
        Question(
            name="accuracy, N 1 less N 4",
            left=Last("N = 1", ACCURACY),
            right=Last("N = 4", ACCURACY),
            expect="more",
            margin=2,
            unit="points",
            times=100,
        ),
        Question(
            name="accuracy, N 1 less N 2",
            left=Last("N = 1", ACCURACY),
            right=Last("N = 2", ACCURACY),
            expect="more",
            margin=2,
            unit="points",
            times=100,
            decides=False,
        ),
    ),
    checks=(Check("it learns", Last("N = 1", ACCURACY), "above", 0.8),),
    seeds=FIVE,
    common=MAGISTRAL,
    minutes=8,
    y=ACCURACY,
    shown=(ENTROPY, LAG),
    review=Review(said=SATURATED, checks=(still_rises("N = 4", 8),)),
)

CLIPS = {"0.28": HIGHER, "0.2": ("loss.clip_low=0.2", "loss.clip_high=0.2")}
SEVERAL = (
    "groups_per_step=64",
    "trainer.minibatches_per_step=4",
    "max_steps=32",
    "eval.every=4",
    WHITE,
)

magistral_clip = Study(
    name="magistral_clip",
    paper="Magistral",
    section="2.1",
    title="Clip-higher keeps entropy",
    claim="an upper clip of 0.28 keeps a higher entropy than one of 0.2, and no lower accuracy.",
    refuted_by="an entropy that is no higher, or an accuracy that is over 2 points lower.",
    arms=tuple(Arm(f"clip {name}", words) for name, words in CLIPS.items()),
    questions=(
        Question(
            name="entropy, 0.28 less 0.2",
            left=MeanOver("clip 0.28", ENTROPY),
            right=MeanOver("clip 0.2", ENTROPY),
            expect="more",
            margin=0,
            unit="nats",
            form=".4f",
        ),
        Question(
            name="accuracy, 0.28 less 0.2",
            left=Last("clip 0.28", ACCURACY),
            right=Last("clip 0.2", ACCURACY),
            expect="more",
            margin=-2,
            unit="points",
            times=100,
        ),
    ),
    checks=(
        Check("the upper clip acts", MeanOver("clip 0.2", "clip/high"), "above", 0.0005),
        Check("it learns", Last("clip 0.2", ACCURACY), "above", 0.8),
    ),
    seeds=FIVE,
    common=(*MAGISTRAL, *SEVERAL),
    minutes=12,
    y=ENTROPY,
    shown=(ACCURACY, "clip/high"),
    remarks=("Four minibatches a batch: with one update, on-policy, no ratio would be clipped.",),
)

magistral_whiten = Study(
    name="magistral_whiten",
    paper="Magistral",
    section="2.1",
    title="Normalising advantages changes little",
    claim="advantages over the deviation of their minibatch learn as those of a group's mean alone "
    "do.",
    refuted_by="a difference of over 2 points.",
    arms=(
        Arm("normalised", minibatches(1)),
        Arm("mean alone", tuple(word for word in minibatches(1) if word != WHITE)),
    ),
    questions=(
        Question(
            name="accuracy, normalised less mean alone",
            left=Last("normalised", ACCURACY),
            right=Last("mean alone", ACCURACY),
            expect="same",
            margin=2,
            unit="points",
            times=100,
        ),
    ),
    checks=(Check("it learns", Last("mean alone", ACCURACY), "above", 0.8),),
    seeds=FIVE,
    common=MAGISTRAL,
    minutes=6,
    y=ACCURACY,
    shown=(ENTROPY,),
    review=Review(said=SATURATED, checks=(still_rises("mean alone", 8),)),
)

FASTER = ("tba", "online_dpo", "grpo")

tba_faster = Study(
    name="tba_faster",
    paper="TBA",
    section="5.1, 5.2",
    title="TBA needs fewer steps than its rivals",
    claim="on fresh groups TBA is at 90 % in fewer steps than Online DPO and GRPO.",
    refuted_by="steps to 90 % that are not fewer by over 2.",
    arms=tuple(Arm(loss, (f"loss={loss}",)) for loss in FASTER),
    questions=tuple(
        Question(
            name=f"steps to 90 %, TBA less {loss}",
            left=FirstAt("tba", ACCURACY, 0.9),
            right=FirstAt(loss, ACCURACY, 0.9),
            expect="less",
            margin=2,
            unit="steps",
        )
        for loss in FASTER[1:]
    ),
    checks=tuple(Check("it arrives", Last(loss, ACCURACY), "above", 0.88) for loss in FASTER),
    seeds=FIVE,
    common=("threads=1", "lr=3e-5", "max_steps=64", "eval.every=2", "max_lag=1", *BATCH),
    minutes=10,
    y=ACCURACY,
    shown=(LAG,),
    review=Review(
        said="the paper claims no fewer steps. Its claim (5.3, figures 1 and 3) is of wall-clock "
        "time, for trajectory balance from a replay buffer, and this is `loss=tba` on fresh "
        "groups. The looks are two steps apart, as wide as the margin.",
        source="ours; not TBA, 5.3",
    ),
)

LOSSES = (
    "aipo",
    "reinforce",
    "grpo",
    "dr_grpo",
    "ppo",
    "rloo",
    "copg",
    "proximal_rloo",
    "online_dpo",
    "best_of_n",
    "tb",
    "tba",
    "cispo",
    "icepop",
    "kimi_k2",
)

all_losses = Study(
    name="all_losses",
    paper="15 papers",
    section="docs/algorithms.md",
    title="Every loss learns additions",
    claim="each of the package's losses takes the model from 40 % to 80 % and more within 64 steps "
    "at one rate, a step off-policy.",
    refuted_by="a loss that ends below 80 %.",
    arms=tuple(Arm(loss, (f"loss={loss}",)) for loss in LOSSES),
    questions=tuple(
        Question(
            name=f"accuracy of {loss}, over 80 %",
            left=Last(loss, ACCURACY),
            right=Constant(0.8),
            expect="more",
            margin=0,
            unit="points",
            times=100,
        )
        for loss in LOSSES
    ),
    checks=(),
    seeds=(0, 1, 2),
    common=("threads=1", "lr=3e-5", "max_steps=64", "eval.every=4", "max_lag=1", *BATCH),
    minutes=20,
    y=ACCURACY,
    shown=(LAG,),
    remarks=("No loss's options were tuned, nor its rate.",),
)

OFFPOLICY = (
    lag_holds,
    aipo_cap,
    sync_async,
    magistral_batch,
    magistral_clip,
    magistral_whiten,
    tba_faster,
    all_losses,
)
