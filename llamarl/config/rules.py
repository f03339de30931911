"""What no single value of a configuration shows: values, files and ranks that cannot work together,
each with the remedy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from omegaconf import OmegaConf

from llamarl.config.conversion import (
    Problem,
    convert,
    describe,
    did_you_mean,
    names_of,
    show,
    to_values,
)
from llamarl.config.loss_options import LOSS_OPTIONS, contradiction, declarations, declares
from llamarl.config.placement import generator_problems, placement_problems
from llamarl.config.schema import Config, LossSettings, TaskSettings


def _conf_dir() -> Path:
    """conf/, which an installed package has inside, and a checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


CONF_DIR = _conf_dir()
FILE_TASKS, KEYED_TASKS = ("jsonl", "gsm8k", "hf_dataset"), ("jsonl", "hf_dataset")
READ_BY = {  # keys that only these kinds of task read
    "path": FILE_TASKS,
    "eval_path": FILE_TASKS,
    "prompt_key": KEYED_TASKS,
    "answer_key": KEYED_TASKS,
    "name": ("reasoning_gym",),
}

Rule = tuple[str, bool, str]  # the keys, whether they are wrong, the remedy


def check(config: Config, world_size: int, local_world_size: int | None = None) -> list[Problem]:
    """What cannot work together, or with this many ranks and these files."""
    values = to_values(config)

    def problem(what: str, *keys: str) -> Problem:
        shown = (
            (key, functools.reduce(lambda section, part: section[part], key.split("."), values))
            for key in keys
        )
        return Problem(" ".join(f"{key}={show(value)}" for key, value in shown), what, keys)

    c, g, hosts = config, config.governor, -(-world_size // (local_world_size or world_size))
    ahead = c.max_lag != 0
    truncates = c.on_deadline == "truncate"
    impossible = [
        (
            "overcommit max_lag",
            c.max_lag == 0 and c.overcommit not in ("auto", 0),
            "without lag nothing can start ahead; overcommit=0, or max_lag=1",
        ),
        (
            "on_deadline max_lag",
            truncates and c.max_lag == 0,
            "without lag every ticket is due at its own step, and none could stand in for it; on_deadline=wait, or max_lag=1",
        ),
        (
            "on_deadline overcommit",
            truncates and ahead and c.overcommit == 0,
            "ends a straggler once others make up its batch, and none are started beyond one; overcommit=auto, or on_deadline=wait",
        ),
        (
            "governor.least governor.most",
            g.most is not None and g.least > g.most,
            "the least is more than the most",
        ),
        (
            "governor.start governor.least",
            g.start is not None and g.start < g.least,
            "starts below the least",
        ),
        (
            "governor.start governor.most",
            None not in (g.start, g.most) and g.start > g.most,
            "starts above the most",
        ),
        (
            "group_size generator.max_slots",
            c.group_size > c.generator.max_slots,
            "a group does not fit the slots of a generator; raise generator.max_slots",
        ),
        (
            "resume run_dir",
            c.resume == "auto" and not c.run_dir,
            "needs the run to go on with: run_dir=DIR",
        ),
        (
            "resume_with_other resume",
            bool(c.resume_with_other) and c.resume == "never",
            "nothing is gone on with; resume=auto or a checkpoint's directory, or resume_with_other=[]",
        ),
        (
            "offload",
            c.offload and not c.placement.colocate,
            "moves executors that share a device out of each other's way; name them: placement.colocate=[trainer,generator]",
        ),
        (
            "offload max_lag",
            c.offload and ahead,
            "with any lag trainer and generator work at the same time, so neither can leave the device; max_lag=0",
        ),
        (
            "weights.transport",
            c.weights.transport in ("shm", "cuda_ipc") and hosts > 1,
            f"ranks on {hosts} hosts share no memory; weights.transport=gloo or nccl, or auto",
        ),
    ]
    problems = placement_problems(config, world_size, problem) + generator_problems(config, problem)
    problems += [
        problem(what, *keys.split())
        for keys, wrong, what in impossible
        + _task_rules(config)
        + _learning_rules(config)
        + _replay_rules(config)
        if wrong
    ]
    unread = [f"task.{key}" for key in _unread(c.task)]
    for key, path in (
        ("task.path", c.task.path),
        ("task.eval_path", c.task.eval_path),
        ("model.path", c.model.path),
    ):
        needed = Path(path or ".") / ("config.json" if path and key == "model.path" else "")
        if key not in unread and not needed.exists():
            problems.append(problem(f"no such file: {needed}", key))
    if c.resume not in ("auto", "never") and not Path(c.resume).is_dir():
        problems.append(
            problem("no such directory; need auto, never or a checkpoint's directory", "resume")
        )
    return problems + _loss_problems(c.loss)


def _task_rules(c: Config) -> list[Rule]:
    """Of the task, its reward and evaluation."""
    kind, aims = c.task.kind, c.eval.target is not None
    return [
        *(
            (
                f"task.{key} task.kind",
                True,
                f"only task={' or '.join(READ_BY[key])} reads it; {kind} has {show(own)}",
            )
            for key, own in _unread(c.task).items()
        ),
        (
            "task.path task.kind",
            kind in FILE_TASKS and not c.task.path,
            "needs its data: task.path=PATH",
        ),
        (
            "task.name task.kind",
            kind == "reasoning_gym" and not c.task.name,
            "needs the name of a problem, such as task.name=chain_sum",
        ),
        (
            "task.answer_key reward.fn",
            kind in KEYED_TASKS and c.task.answer_key is None and c.reward.fn is None,
            "the task's own reward compares with an answer; reward.fn=module:function, or task.answer_key=answer",
        ),
        (
            "eval.target eval.every",
            aims and c.eval.every == 0,
            "nothing is evaluated, so no target is reached; eval.every=10, or eval.target=null",
        ),
        (
            "eval.target eval.num_prompts",
            aims and c.eval.num_prompts == 0,
            "nothing is evaluated, so no target is reached; eval.num_prompts=500, or eval.target=null",
        ),
    ]


def _unread(task: TaskSettings) -> dict[str, object]:
    """The keys that the kind does not read and that are not as in its own file, with the file's
    values.
    """
    published = OmegaConf.load(CONF_DIR / "task" / f"{task.kind}.yaml")
    published = published.get("task", published)
    ignored = [key for key, kinds in READ_BY.items() if task.kind not in kinds]
    return {key: published[key] for key in ignored if getattr(task, key) != published[key]}


def _learning_rules(c: Config) -> list[Rule]:
    """Of the loss, the advantages and the trainer."""
    by_token = c.trainer.advantages == "gae"
    return [
        (
            "group_size trainer.advantages",
            c.group_size < 2 and c.trainer.advantages != "gae",
            "a group of one has no baseline: its advantage is always 0; need at least 2, or trainer.advantages=gae",
        ),
        (
            "trainer.advantages loss.fn",
            by_token
            and c.loss.fn in declarations()
            and not declares(c.loss.fn, "token_advantages"),
            "gives each token its own advantage, which this loss does not use; "
            f"group_mean, or loss={' or '.join(_token_losses())}",
        ),
        (
            "trainer.filter_groups trainer.advantages",
            c.trainer.filter_groups and by_token,
            "with a value head groups of equal rewards teach too; trainer.filter_groups=false",
        ),
        (
            "trainer.whiten trainer.advantages",
            c.trainer.whiten == "completions" and by_token,
            "gae gives each token its own advantage, none of a completion; trainer.whiten=advantages",
        ),
        (
            "trainer.reward_kl_coef reference.enabled",
            c.trainer.reward_kl_coef > 0 and not c.reference.enabled,
            "needs a reference: reference=frozen, or trainer.reward_kl_coef=0",
        ),
        (
            "loss.kl_coef reference.enabled",
            bool(c.loss.kl_coef) and not c.reference.enabled,
            "needs a reference: reference=frozen, or loss.kl_coef=0",
        ),
        (
            "loss.fn reference.enabled",
            declares(c.loss.fn, "needs_reference") and not c.reference.enabled,
            "compares with a reference: reference=frozen",
        ),
        (
            "trainer.lora.rank trainer.tensor_parallel",
            c.trainer.lora.rank > 0 and c.trainer.tensor_parallel > 1,
            "adapters of split projections are not supported; trainer.tensor_parallel=1 (FSDP2 shards), or trainer.lora.rank=0",
        ),
        (
            "trainer.optimizer offload",
            c.trainer.optimizer == "adamw8bit" and c.offload,
            "8-bit moments cannot leave the device; trainer.optimizer=adamw, or offload=false",
        ),
        (
            "trainer.optimizer trainer.cpu_offload",
            c.trainer.optimizer == "adamw8bit" and c.trainer.cpu_offload,
            "8-bit moments are for a device's memory; trainer.optimizer=adamw, or trainer.cpu_offload=false",
        ),
        (
            "offload trainer.cpu_offload",
            c.offload and c.trainer.cpu_offload,
            "both keep the trainer in host memory; trainer.cpu_offload=false, or offload=false",
        ),
        (
            "weights.transport trainer.cpu_offload",
            c.weights.transport in ("nccl", "cuda_ipc") and c.trainer.cpu_offload,
            "weights that leave from host memory travel by shm or gloo; weights.transport=auto",
        ),
        (
            "trainer.lora.targets trainer.lora.rank",
            c.trainer.lora.rank > 0 and not c.trainer.lora.targets,
            "nothing to adapt: name projections, such as trainer.lora.targets=[q_proj,v_proj]",
        ),
        (
            "trainer.warmup_steps max_steps",
            c.trainer.warmup_steps > c.max_steps > 0,
            "the warm-up would not end",
        ),
        (
            "trainer.decay_steps trainer.schedule",
            c.trainer.decay_steps is not None and c.trainer.schedule != "wsd",
            "only wsd ends with a decay; trainer.schedule=wsd, or null",
        ),
        (
            "trainer.decay_steps trainer.warmup_steps max_steps",
            c.trainer.decay_steps is not None
            and c.trainer.decay_steps + c.trainer.warmup_steps > c.max_steps > 0,
            "warm-up and decay are longer than the run",
        ),
    ]


def _replay_rules(c: Config) -> list[Rule]:
    """Of a replay buffer, a reference that is reset, and a schedule of beta."""
    b, s = c.buffer, c.beta_schedule
    replay, unbounded = b.kind == "replay", c.max_lag is None
    needed = ("sync_period", "most_on_policy", "priority", "temperature", "max_size")
    own, given = (*needed, "completions_per_prompt", "initial_completions"), dataclasses.asdict(b)
    trained, beta = c.groups_per_step * c.trained_per_prompt, c.loss.options.get("beta")
    set_for_fifo = [key for key in own if not replay and given[key] is not None]
    unset = [key for key in needed if replay and given[key] is None]
    return [
        *(
            (f"buffer.{key}", True, "is the replay buffer's: buffer=replay, or null")
            for key in set_for_fifo
        ),
        *(
            (f"buffer.{key}", True, "the replay buffer needs it; start from buffer=replay")
            for key in unset
        ),
        (
            "max_lag buffer.kind",
            unbounded and not replay,
            "no bound is for a buffer that has one of its own: buffer=replay, or max_lag=1",
        ),
        (
            "overcommit max_lag",
            unbounded and c.overcommit in ("oppo", "window"),
            "their rules are for a bounded lag; a number of groups, or auto: no limit",
        ),
        (
            "on_deadline max_lag",
            unbounded and c.on_deadline == "truncate",
            "without a bound nothing has a deadline; on_deadline=wait, or generator.max_seconds",
        ),
        (
            "buffer.max_size groups_per_step",
            replay and b.max_size is not None and b.max_size < trained,
            f"does not hold the {trained} completions of a step; raise it",
        ),
        (
            "buffer.completions_per_prompt group_size",
            replay and c.trained_per_prompt > c.group_size,
            "a prompt has fewer completions than are trained on at once: TBA's S >= K; raise group_size",
        ),
        (
            "buffer.completions_per_prompt trainer.advantages",
            replay
            and b.completions_per_prompt == 1 < c.group_size
            and c.trainer.advantages != "gae",
            "one completion of a prompt has no baseline: its advantage is always 0; need at least 2, or trainer.advantages=gae",
        ),
        (
            "buffer.initial_completions max_lag",
            replay
            and not unbounded
            and (b.initial_completions or 0) > c.groups_per_step * c.group_size,
            "with a bounded lag a step begins with one batch; max_lag=null, or a smaller fill",
        ),
        (
            "buffer.initial_completions buffer.max_size",
            replay and b.max_size is not None and (b.initial_completions or 0) > b.max_size,
            "the buffer does not hold its initial fill",
        ),
        (
            "reference.reset_every reference.enabled",
            c.reference.reset_every is not None and not c.reference.enabled,
            "needs a reference: reference=reset",
        ),
        (
            "reference.reset_every buffer.kind",
            c.reference.reset_every is not None and replay,
            "what the buffer holds was scored by earlier references; reference=frozen, or buffer=fifo",
        ),
        (
            "reference.reset_every offload",
            c.reference.reset_every is not None and c.offload,
            "the policy's weights travel to the reference while others have the device; offload=false, or reference=frozen",
        ),
        (
            "beta_schedule.kind loss.fn",
            s.kind != "constant" and not isinstance(beta, (int, float)),
            "needs a loss with an option beta, and its first value: loss.beta=0.01",
        ),
        (
            "beta_schedule.kind beta_schedule.final",
            s.kind != "constant" and s.final is None,
            "needs the value to end at",
        ),
        (
            "beta_schedule.kind beta_schedule.end_step",
            s.kind != "constant" and s.end_step is None,
            "needs the step at which the line ends",
        ),
        (
            "beta_schedule.kind beta_schedule.cut_step",
            s.kind == "cut" and s.cut_step is None,
            "needs the step from which the final value holds",
        ),
        (
            "beta_schedule.kind",
            s.kind == "constant" and any(v is not None for v in (s.final, s.end_step, s.cut_step)),
            "does not read final, end_step and cut_step; linear, or cut",
        ),
    ]


def _published_losses() -> dict[str, Mapping[str, object]]:
    """What `loss=NAME` sets in the section `loss`, by name: the files of conf/loss."""
    files = sorted((CONF_DIR / "loss").glob("*.yaml"))
    return {file.stem: OmegaConf.load(file)["loss"] for file in files}


def _token_losses() -> list[str]:
    """The published losses whose advantages may differ from token to token."""
    published = _published_losses()
    return [name for name in published if declares(published[name]["fn"], "token_advantages")]


def _loss_problems(loss: LossSettings) -> list[Problem]:
    """A loss that does not exist, or options that it does not take or that cannot be."""
    published = _published_losses()
    if ":" in loss.fn:
        return _own_loss_problems(loss, list(published.values()))
    where = f"loss.fn={loss.fn}"
    losses = declarations()
    if loss.fn not in losses and loss.fn not in published:
        nearest = did_you_mean(loss.fn, [*published, *losses])
        what = f"need {' or '.join(losses)} or module:function{nearest}"
        return [Problem(where, what, ("loss.fn",))]
    if loss.fn not in losses or not set(losses[loss.fn].options) <= set(loss.options):
        choices = [name for name in published if loss.fn in (name, published[name]["fn"])]
        what = f"has options of its own; choose it with them: loss={' or '.join(choices)}"
        return [Problem(where, what, ("loss.fn",))]
    names = losses[loss.fn].options
    keys = [f"loss.{name}" for name in names]
    problems = []
    for name, value in loss.options.items():
        key = f"loss.{name}"
        if name not in names:
            known = name in LOSS_OPTIONS
            nearest = f"; {loss.fn} does not take it" if known else did_you_mean(key, keys)
            problems.append(Problem(key, f"unknown key{nearest}", (key,)))
            continue
        hint = LOSS_OPTIONS[name]
        try:
            convert(value, hint)
        except ValueError:
            nearest = did_you_mean(value, names_of(hint)) if isinstance(value, str) else ""
            what = f"need {describe(hint)}{nearest}"
            problems.append(Problem(f"{key}={show(value)}", what, (key,)))
    wrong = None if problems else contradiction(loss.options)
    if wrong is not None:
        together, what = wrong
        keys = [f"loss.{name}" for name in together.split()]
        where = " ".join(f"{key}={show(loss.options[key[5:]])}" for key in keys)
        problems.append(Problem(where, what, tuple(keys)))
    return problems


def _own_loss_problems(loss: LossSettings, published: list[Mapping[str, object]]) -> list[Problem]:
    """The same for a function of the user's own, beside which the options of the chosen file in
    conf/loss are still there.
    """
    from llamarl.learning.losses import (  # imports torch, so only here
        check_options,
        options_of,
        resolve_loss,
    )

    where, keys = f"loss.fn={loss.fn}", ("loss.fn",)
    try:
        fn = resolve_loss(loss.fn)
        options = loss.options_for(set(options_of(fn)))
        check_options(fn, options)
    except ValueError as error:
        return [Problem(where, line, keys) for line in str(error).splitlines()]
    dropped = set(loss.options) - set(options)
    given = [
        name
        for name in sorted(dropped)
        if loss.options[name] not in [None, *(options.get(name) for options in published)]
    ]
    return [
        Problem(
            f"loss.{name}={show(loss.options[name])}",
            f"{loss.fn} does not take it",
            (f"loss.{name}",),
        )
        for name in given
    ]
