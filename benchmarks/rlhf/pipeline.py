"""The whole of RLHF, from nothing to a curve of gold, on two CPU cores: a synthetic TL;DR whose
gold is a program (llamarl/tasks/facts.py), and a policy that sees only a reward model.

    python benchmarks/rlhf/pipeline.py out=DIR
    # Another seed, and keys of the commands of two stages.
    python benchmarks/rlhf/pipeline.py out=DIR seed=1 rl.max_steps=120 data.rows=8000

    data          posts, and a sloppy teacher's summaries       DIR/start, DIR/teacher.jsonl
    sft           learns them                                   DIR/sft
    pairs         best and worst samples; 20 % labelled wrongly DIR/pairs.jsonl
    clean_pairs   of held-out posts, none wrong                 DIR/clean_pairs.jsonl
    reward_model  learns the pairs, is held to the clean ones   DIR/reward_model
    rl            against it, asynchronously; gold looks on     DIR/rl
    judge_sft     gold of greedy and sampled answers before     DIR/judged_sft.jsonl
    judge_rl      and after                                     DIR/judged_rl.jsonl
    report        a table, and plots                            DIR/rlhf.png, DIR/rlhf.json

Each stage is a command, which is printed and can be typed without this recipe. DIR/stages has what
each took, in the launch that ended it; a stage that is there is skipped, and the one that was cut
off goes on where it was. STAGE.KEY=VALUE is a key of the stage's command, which it is checked for
before anything starts. Exit status: 0, 2 for words that cannot be used, or that of the stage that
failed. benchmarks/rlhf/README.md walks through a run.
"""

from __future__ import annotations

import json
import resource
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from facts_data import DEFAULTS, FactsDataSettings

from llamarl.config.command_line import RL, JobKind, check_command_line
from llamarl.config.conversion import ConfigError, Problem
from llamarl.config.evaluation import EVALUATION
from llamarl.config.preferences import PREFERENCES
from llamarl.config.script import read_script
from llamarl.config.supervised import REWARD_MODEL, SFT
from llamarl.disk.files import replace_text
from llamarl.words.names import did_you_mean

ROOT = Path(__file__).resolve().parents[2]
FACTS_DATA = "benchmarks/rlhf/facts_data.py"
RANKS = 2
GOLD = "llamarl.tasks.facts:gold"
# Settings of the task for the tokenizer that facts_data.py writes: a post has at most 75 tokens, a
# gold summary 21 with its end.
TASK = ("task=facts", "task.max_prompt_tokens=80", "max_new_tokens=32", "temperature=0.7")
# What reads the words of a recipe that is a job.
KINDS: dict[str, JobKind] = {
    "recipes/sft.py": SFT,
    "recipes/preferences.py": PREFERENCES,
    "recipes/reward_model.py": REWARD_MODEL,
    "recipes/llama_async.py": RL,
    "recipes/evaluate.py": EVALUATION,
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One command."""

    name: str
    script: str  # a file of the checkout
    words: tuple[str, ...]
    ranks: int | None = None  # of torchrun; None: one plain process

    def typed(self) -> list[str]:
        """Return the command as a user types it."""
        launcher = ["python"]
        if self.ranks:
            launcher = ["torchrun", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [*launcher, self.script, *self.words]

    def started(self) -> list[str]:
        """Return the command as it is started, by this interpreter and from any directory."""
        launcher = [sys.executable]
        if self.ranks:
            module = ["-m", "torch.distributed.run", "--standalone"]
            launcher += [*module, f"--nproc-per-node={self.ranks}"]
        return [*launcher, str(ROOT / self.script), *self.words]

    def given(self, words: list[str]) -> Stage:
        """Return this stage with more words, each in the place of one with the same key."""
        own = {key_of(word): word for word in (*self.words, *words)}
        return replace(self, words=tuple(own.values()))


@dataclass(frozen=True, slots=True)
class Took:
    """A stage that is done, and what the launch that ended it took."""

    command: str
    seconds: float
    cpu_seconds: float  # of all its processes


def key_of(word: str) -> str:
    return word.partition("=")[0]


def stages(out: Path, seed: int) -> list[Stage]:
    """Return the pipeline."""
    sft = f"{out}/sft"
    scorer = f"{out}/reward_model"
    seeded = f"seed={seed}"
    sampled = ("model.dtype=float32", *TASK, seeded)
    supervised = (
        "task.max_tokens=112",
        "model.dtype=float32",
        "trainer.schedule=cosine",
        "trainer.warmup_fraction=0.05",
        "trainer.beta2=0.99",
        seeded,
        "resume=auto",
    )
    return [
        Stage(
            name="data",
            script=FACTS_DATA,
            words=(f"out={out}", seeded, "rows=20000"),
        ),
        Stage(
            name="sft",
            script="recipes/sft.py",
            ranks=RANKS,
            words=(
                f"model.path={out}/start",
                f"task.path={out}/teacher.jsonl",
                f"task.eval_path={out}/teacher_held_out.jsonl",
                f"out={sft}",
                "examples_per_step=32",
                "lr=2e-3",
                "epochs=2",
                "eval.every=200",
                *supervised,
            ),
        ),
        Stage(
            name="pairs",
            script="recipes/preferences.py",
            words=(
                f"model.path={sft}",
                *sampled,
                "num_prompts=18000",
                "samples=4",
                "pairing=best_worst",
                "label_noise=0.2",
                f"out={out}/pairs.jsonl",
            ),
        ),
        Stage(
            name="clean_pairs",
            script="recipes/preferences.py",
            words=(
                f"model.path={sft}",
                *sampled,
                "split=held_out",
                "samples=4",
                "pairing=best_worst",
                f"out={out}/clean_pairs.jsonl",
            ),
        ),
        Stage(
            name="reward_model",
            script="recipes/reward_model.py",
            ranks=RANKS,
            words=(
                f"model.path={sft}",
                f"task.path={out}/pairs.jsonl",
                f"task.eval_path={out}/clean_pairs.jsonl",
                f"out={scorer}",
                "examples_per_step=64",
                "lr=3e-4",
                "epochs=2",
                "eval.every=50",
                "loss.center_coef=0.01",
                *supervised,
            ),
        ),
        Stage(
            name="rl",
            script="recipes/llama_async.py",
            ranks=RANKS,
            words=(
                "model=tiny",
                f"model.path={sft}",
                *sampled,
                "reward=model",
                f"reward.path={scorer}",
                "reference=frozen",
                "loss=rloo",
                "max_lag=1",
                "groups_per_step=32",
                "group_size=4",
                "lr=1e-4",
                "trainer.reward_kl_coef=0.05",
                "max_steps=60",
                f"eval.gold={GOLD}",
                "eval.num_prompts=200",
                "eval.every=5",
                f"run_dir={out}/rl",
                "resume=auto",
            ),
        ),
        _judge("sft", sft, out),
        _judge("rl", f"{out}/rl/checkpoints/latest", out),
        Stage(name="report", script="benchmarks/rlhf/report.py", words=(str(out),)),
    ]


def _judge(name: str, model: str, out: Path) -> Stage:
    """Return the stage in which gold scores a model's completions: its own reward is what the task
    has.
    """
    return Stage(
        name=f"judge_{name}",
        script="recipes/evaluate.py",
        words=(
            "model=tiny",
            f"model.path={model}",
            *TASK,
            "reward=function",
            "model.dtype=float32",
            "eval.num_prompts=500",
            "samples=1",
            f"out={out}/judged_{name}.jsonl",
        ),
    )


def read_words(words: list[str]) -> tuple[Path, list[Stage]]:
    """Return the directory, and the pipeline with what the words add to it. ValueError."""
    own = {"out": "", "seed": "0"}
    added: dict[str, list[str]] = {}
    problems = []
    known = [*own, *(stage.name for stage in stages(Path("DIR"), 0))]
    for word in words:
        key, has_value, value = word.partition("=")
        name, _, rest = word.partition(".")
        if not has_value:
            problems.append(Problem(word, "write key=value, or STAGE.KEY=VALUE"))
        elif key in own:
            own[key] = value
        elif "." in key and name in known:
            added.setdefault(name, []).append(rest)
        else:
            unknown = key.partition(".")[0]
            what = f"not known here{did_you_mean(unknown, known)}; there are {', '.join(known)}"
            problems.append(Problem(key, what))
    if not own["out"]:
        problems.append(Problem("out", "required: set out=DIR"))
    if not own["seed"].isdecimal():
        problems.append(Problem(f"seed={own['seed']}", "need a whole number of at least 0"))
    out = Path(own["out"])
    pipeline = stages(out, int(own["seed"]) if own["seed"].isdecimal() else 0)
    for stage in pipeline:
        problems += problems_of(stage, added.get(stage.name, []))
    if problems:
        raise ConfigError(problems)
    return out, [stage.given(added.get(stage.name, [])) for stage in pipeline]


def problems_of(stage: Stage, words: list[str]) -> list[Problem]:
    """Return what is wrong with words that are added to a stage, under its name. Problems of
    the stage's own words are left out: they name files that only the running pipeline makes.
    """
    if not words:
        return []
    added = {key_of(word).lstrip("+") for word in words}
    found: list[Problem] = []
    try:
        if stage.script in KINDS:
            ranks = stage.ranks or 1
            given = list(stage.given(words).words)
            check_command_line(given, world_size=ranks, kind=KINDS[stage.script])
        elif stage.script == FACTS_DATA:
            given = list(stage.given(words).words)
            read_script(given, FactsDataSettings, DEFAULTS, doc=None)
        else:
            found.append(Problem(words[0], "this stage has no keys"))
    except ConfigError as error:
        found += [problem for problem in error.problems if added & set(problem.keys)]
    problems = []
    for problem in found:
        what = problem.what.replace("write ", f"write {stage.name}.")
        problems.append(Problem(f"{stage.name}.{problem.where}", what))
    return problems


def taken(out: Path, stage: Stage) -> Took | None:
    """Return what a stage took that is done; None: it is not. ValueError if it was another
    command.
    """
    file = record_of(out, stage)
    if not file.is_file():
        return None
    took = Took(**json.loads(file.read_text()))
    if took.command != shlex.join(stage.typed()):
        raise ValueError(
            f"stage {stage.name} was done by another command:\n  {took.command}\nchoose another "
            f"out=DIR; or remove {file} and what it wrote, and those of the stages behind it"
        )
    return took


def record_of(out: Path, stage: Stage) -> Path:
    return out / "stages" / f"{stage.name}.json"


def run(out: Path, stage: Stage) -> int:
    """Run a stage and record what it took. Returns its exit status."""
    start_s = time.monotonic()
    cpu_before_s = children_cpu_s()
    status = wait_for(subprocess.Popen(stage.started()))
    if status == 0:
        took = Took(
            command=shlex.join(stage.typed()),
            seconds=round(time.monotonic() - start_s, 1),
            cpu_seconds=round(children_cpu_s() - cpu_before_s, 1),
        )
        replace_text(record_of(out, stage), json.dumps(asdict(took), indent=2) + "\n")
        print(f"done     {stage.name} in {took.seconds:.0f} s, {took.cpu_seconds:.0f} s of CPU")
    return status


def children_cpu_s() -> float:
    """CPU time of all processes that have ended under this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wait_for(stage: subprocess.Popen) -> int:
    """Wait for a stage, which ends its own waits, and return its exit status. Ctrl-C reaches it by
    itself, and SIGTERM is passed on, so that it can save what it has.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: stage.terminate()),
    }
    try:
        return stage.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        out, pipeline = read_words(words)
        done = {stage.name: taken(out, stage) for stage in pipeline}
        (out / "stages").mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"rlhf: {error}", file=sys.stderr)
        return 2
    for number, stage in enumerate(pipeline, start=1):
        print(
            f"\n[{number}/{len(pipeline)}] {stage.name}\n  {shlex.join(stage.typed())}", flush=True
        )
        if done[stage.name]:
            print("done before")
            continue
        status = run(out, stage)
        if status:
            again = "the same command goes on from here"
            print(f"rlhf: stage {stage.name} ended with {status}; {again}", file=sys.stderr)
            return status if status > 0 else 128 - status
    return 0


if __name__ == "__main__":
    sys.exit(main())
