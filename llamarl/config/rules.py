"""What no single value of a configuration shows: values, files and ranks that cannot work together,
each with the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from llamarl.config.conversion import Problem, convert, did_you_mean, flat, need, show, to_values
from llamarl.config.loss_options import LOSS_OPTIONS, contradiction, declarations, declares
from llamarl.config.placement import placement_problems
from llamarl.config.schema import Config, LossSettings


def _conf_dir() -> Path:
    """conf/, which an installed package has inside, and a checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


CONF_DIR = _conf_dir()


Rule = tuple[str, bool, str]  # the keys, whether they are wrong, the remedy


def check(config: Config, world_size: int, local_world_size: int | None = None) -> list[Problem]:
    """What cannot work together, or with this many ranks and these files."""
    values = flat(to_values(config))

    def problem(what: str, *keys: str) -> Problem:
        where = " ".join(f"{key}={show(values[key])}" for key in keys)
        return Problem(where, what, keys)

    num_hosts = -(-world_size // (local_world_size or world_size))
    rules = [
        *_generator_rules(config),
        *_lag_rules(config),
        *_governor_rules(config),
        *_run_rules(config),
        *_device_rules(config, num_hosts),
        *_task_rules(config),
        *_advantage_rules(config),
        *_reference_rules(config),
        *_trainer_rules(config),
        *_replay_rules(config),
        *_beta_rules(config),
    ]
    problems = placement_problems(config, world_size, problem)
    problems += [problem(remedy, *keys.split()) for keys, wrong, remedy in rules if wrong]
    if config.generator.kind == "vllm":
        from llamarl.inference.vllm_engine import vllm_problem  # imports torch, so only for vLLM

        if what := vllm_problem():
            problems.append(problem(what, "generator.kind"))
    return problems + _file_problems(config, values, problem) + _loss_problems(config.loss)


def _file_problems(
    config: Config, values: Mapping[str, object], problem: Callable[..., Problem]
) -> list[Problem]:
    """Data, a model or a checkpoint that is not there."""
    needed = {key: values.get(key) for key in ("task.path", "task.eval_path", "model.path")}
    files = {key: Path(path) for key, path in needed.items() if path}
    if "model.path" in files:
        files["model.path"] /= "config.json"
    problems = [
        problem(f"no such file: {file}", key) for key, file in files.items() if not file.exists()
    ]
    if config.resume not in ("auto", "never") and not Path(config.resume).is_dir():
        what = "no such directory; need auto, never or a checkpoint's directory"
        problems.append(problem(what, "resume"))
    return problems


def _generator_rules(c: Config) -> list[Rule]:
    """Of the generator's slots, cache and unfinished completions."""
    g = c.generator
    longest = c.task.max_prompt_tokens + c.max_new_tokens
    resumes = g.resume_partials is True
    return [
        (
            "generator.min_new_tokens max_new_tokens",
            g.min_new_tokens > c.max_new_tokens,
            "the least is more than the most",
        ),
        (
            "group_size generator.max_slots",
            c.group_size > g.max_slots,
            "a group does not fit the slots of a generator; raise generator.max_slots",
        ),
        (
            "generator.cache_tokens",
            g.cache_tokens is not None and g.cache_tokens < longest,
            "does not hold one sequence of task.max_prompt_tokens + max_new_tokens; "
            f"need at least {longest}, or null",
        ),
        (
            "generator.recompute_kv",
            g.recompute_kv and not c.updates_in_flight,
            "no completion is running when new weights are loaded; leave it out, or raise max_lag",
        ),
        (
            "generator.resume_partials max_lag",
            resumes and c.max_lag == 0,
            "a resumed synchronous run has the bits of an uninterrupted one, "
            "so its completions start again; leave it out",
        ),
        (
            "generator.resume_partials generator.in_flight_updates",
            resumes and c.max_lag != 0 and not c.updates_in_flight,
            "would go on under other weights than they were begun with; leave one of them out",
        ),
        (
            "offload",
            c.offload and g.kind == "vllm",
            "vLLM's memory stays where it is; generator=native, or offload=false",
        ),
    ]


def _lag_rules(c: Config) -> list[Rule]:
    """Of the bound of the lag, and what may start ahead."""
    synchronous, unbounded = c.max_lag == 0, c.max_lag is None
    truncates = c.on_deadline == "truncate"
    return [
        (
            "overcommit max_lag",
            synchronous and c.overcommit not in ("auto", 0),
            "without lag nothing can start ahead; overcommit=0, or max_lag=1",
        ),
        (
            "overcommit max_lag",
            unbounded and c.overcommit in ("oppo", "window"),
            "their rules are for a bounded lag; a number of groups, or auto: no limit",
        ),
        (
            "on_deadline max_lag",
            truncates and synchronous,
            "without lag every ticket is due at its own step, and none could stand in for it; "
            "on_deadline=wait, or max_lag=1",
        ),
        (
            "on_deadline max_lag",
            truncates and unbounded,
            "without a bound nothing has a deadline; on_deadline=wait, or generator.max_seconds",
        ),
        (
            "on_deadline overcommit",
            truncates and not synchronous and c.overcommit == 0,
            "ends a straggler once others make up its batch, and none are started beyond one; "
            "overcommit=auto, or on_deadline=wait",
        ),
        (
            "max_lag buffer.kind",
            unbounded and c.buffer.kind != "replay",
            "no bound is for a buffer that has one of its own: buffer=replay, or max_lag=1",
        ),
    ]


def _governor_rules(c: Config) -> list[Rule]:
    """Of the bounds of overcommit."""
    g = c.governor
    return [
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
            g.start is not None and g.most is not None and g.start > g.most,
            "starts above the most",
        ),
    ]


def _run_rules(c: Config) -> list[Rule]:
    """Of what a run goes on with, and when it ends."""
    aims = c.eval.target is not None
    return [
        (
            "resume run_dir",
            c.resume == "auto" and not c.run_dir,
            "needs the run to go on with: run_dir=DIR",
        ),
        (
            "resume_with_other resume",
            bool(c.resume_with_other) and c.resume == "never",
            "nothing is gone on with; resume=auto or a checkpoint's directory, "
            "or resume_with_other=[]",
        ),
        (
            "eval.target eval.every",
            aims and c.eval.every == 0,
            "nothing is evaluated, so no target is reached; eval.every=10, or eval.target=null",
        ),
        (
            "eval.target eval.num_prompts",
            aims and c.eval.num_prompts == 0,
            "nothing is evaluated, so no target is reached; "
            "eval.num_prompts=500, or eval.target=null",
        ),
    ]


def _device_rules(c: Config, num_hosts: int) -> list[Rule]:
    """Of the memory that executors share, and how weights travel."""
    t, transport = c.trainer, c.weights.transport
    has_8bit_moments = t.optimizer == "adamw8bit"
    return [
        (
            "offload",
            c.offload and not c.placement.colocate,
            "moves executors that share a device out of each other's way; "
            "name them: placement.colocate=[trainer,generator]",
        ),
        (
            "offload max_lag",
            c.offload and c.max_lag != 0,
            "with any lag trainer and generator work at the same time, "
            "so neither can leave the device; max_lag=0",
        ),
        (
            "offload trainer.cpu_offload",
            c.offload and t.cpu_offload,
            "both keep the trainer in host memory; trainer.cpu_offload=false, or offload=false",
        ),
        (
            "trainer.optimizer offload",
            has_8bit_moments and c.offload,
            "8-bit moments cannot leave the device; trainer.optimizer=adamw, or offload=false",
        ),
        (
            "trainer.optimizer trainer.cpu_offload",
            has_8bit_moments and t.cpu_offload,
            "8-bit moments are for a device's memory; "
            "trainer.optimizer=adamw, or trainer.cpu_offload=false",
        ),
        (
            "weights.transport trainer.cpu_offload",
            transport in ("nccl", "cuda_ipc") and t.cpu_offload,
            "weights that leave from host memory travel by shm or gloo; weights.transport=auto",
        ),
        (
            "weights.transport",
            transport in ("shm", "cuda_ipc") and num_hosts > 1,
            f"ranks on {num_hosts} hosts share no memory; weights.transport=gloo or nccl, or auto",
        ),
    ]


def _task_rules(c: Config) -> list[Rule]:
    """Of the task and its reward."""
    if c.task.kind not in ("jsonl", "hf_dataset"):
        return []
    return [
        (
            "task.answer_key reward.fn",
            c.task.answer_key is None and c.reward.fn is None,
            "the task's own reward compares with an answer; "
            "reward.fn=module:function, or task.answer_key=answer",
        ),
    ]


def _advantage_rules(c: Config) -> list[Rule]:
    """Of the advantages, of completions or of tokens."""
    t, fn = c.trainer, c.loss.fn
    by_token = t.advantages == "gae"
    # A name that is no loss is told elsewhere, and a loss of the user's own may take anything.
    refuses_tokens = fn in declarations() and not declares(fn, "token_advantages")
    return [
        (
            "group_size trainer.advantages",
            c.group_size < 2 and not by_token,
            "a group of one has no baseline: its advantage is always 0; "
            "need at least 2, or trainer.advantages=gae",
        ),
        (
            "trainer.advantages loss.fn",
            by_token and refuses_tokens,
            "gives each token its own advantage, which this loss does not use; "
            f"group_mean, or loss={' or '.join(_token_losses())}",
        ),
        (
            "trainer.filter_groups trainer.advantages",
            by_token and t.filter_groups,
            "with a value head groups of equal rewards teach too; trainer.filter_groups=false",
        ),
        (
            "trainer.whiten trainer.advantages",
            by_token and t.whiten == "completions",
            "gae gives each token its own advantage, none of a completion; "
            "trainer.whiten=advantages",
        ),
    ]


def _reference_rules(c: Config) -> list[Rule]:
    """Of the reference, and what compares with it."""
    kind = c.reference.kind
    absent, resets = kind == "none", kind == "reset"
    return [
        (
            "trainer.reward_kl_coef reference.kind",
            absent and c.trainer.reward_kl_coef > 0,
            "needs a reference: reference=frozen, or trainer.reward_kl_coef=0",
        ),
        (
            "loss.kl_coef reference.kind",
            absent and c.loss.kl_coef > 0,
            "needs a reference: reference=frozen, or loss.kl_coef=0",
        ),
        (
            "loss.fn reference.kind",
            absent and declares(c.loss.fn, "needs_reference"),
            "compares with a reference: reference=frozen",
        ),
        (
            "reference.reset_every buffer.kind",
            resets and c.buffer.kind == "replay",
            "what the buffer holds was scored by earlier references; "
            "reference=frozen, or buffer=fifo",
        ),
        (
            "reference.reset_every offload",
            resets and c.offload,
            "the policy's weights travel to the reference while others have the device; "
            "offload=false, or reference=frozen",
        ),
    ]


def _trainer_rules(c: Config) -> list[Rule]:
    """Of adapters and of the learning rate's schedule."""
    t = c.trainer
    adapts, decays = t.lora.rank > 0, t.decay_steps is not None
    return [
        (
            "trainer.lora.rank trainer.tensor_parallel",
            adapts and t.tensor_parallel > 1,
            "adapters of split projections are not supported; "
            "trainer.tensor_parallel=1 (FSDP2 shards), or trainer.lora.rank=0",
        ),
        (
            "trainer.lora.targets trainer.lora.rank",
            adapts and not t.lora.targets,
            "nothing to adapt: name projections, such as trainer.lora.targets=[q_proj,v_proj]",
        ),
        (
            "trainer.warmup_steps max_steps",
            t.warmup_steps > c.max_steps > 0,
            "the warm-up would not end",
        ),
        (
            "trainer.decay_steps trainer.schedule",
            decays and t.schedule != "wsd",
            "only wsd ends with a decay; trainer.schedule=wsd, or null",
        ),
        (
            "trainer.decay_steps trainer.warmup_steps max_steps",
            decays and t.decay_steps + t.warmup_steps > c.max_steps > 0,
            "warm-up and decay are longer than the run",
        ),
    ]


def _replay_rules(c: Config) -> list[Rule]:
    """Of a replay buffer's size and of what is drawn from it."""
    b = c.buffer
    if b.kind != "replay":
        return []
    trained = c.groups_per_step * c.trained_per_prompt
    batch = c.groups_per_step * c.group_size
    initial = b.initial_completions or 0
    by_token = c.trainer.advantages == "gae"
    return [
        (
            "buffer.max_size groups_per_step",
            b.max_size < trained,
            f"does not hold the {trained} completions of a step; raise it",
        ),
        (
            "buffer.completions_per_prompt group_size",
            c.trained_per_prompt > c.group_size,
            "a prompt has fewer completions than are trained on at once: TBA's S >= K; "
            "raise group_size",
        ),
        (
            "buffer.completions_per_prompt trainer.advantages",
            b.completions_per_prompt == 1 and c.group_size > 1 and not by_token,
            "one completion of a prompt has no baseline: its advantage is always 0; "
            "need at least 2, or trainer.advantages=gae",
        ),
        (
            "buffer.initial_completions max_lag",
            c.max_lag is not None and initial > batch,
            "with a bounded lag a step begins with one batch; max_lag=null, or a smaller fill",
        ),
        (
            "buffer.initial_completions buffer.max_size",
            initial > b.max_size,
            "the buffer does not hold its initial fill",
        ),
    ]


def _beta_rules(c: Config) -> list[Rule]:
    """Of a schedule of a loss's option beta."""
    has_beta = isinstance(c.loss.options.get("beta"), int | float)
    return [
        (
            "beta_schedule.kind loss.fn",
            c.beta_schedule.kind != "constant" and not has_beta,
            "needs a loss with an option beta, and its first value: loss.beta=0.01",
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
    where, keys = f"loss.fn={loss.fn}", ("loss.fn",)
    losses = declarations()
    if loss.fn not in losses and loss.fn not in published:
        near = did_you_mean(loss.fn, [*published, *losses])
        what = f"need {' or '.join(losses)} or module:function{near}"
        return [Problem(where, what, keys)]
    if loss.fn not in losses or not set(losses[loss.fn].options) <= set(loss.options):
        choices = [name for name in published if loss.fn in (name, published[name]["fn"])]
        what = f"has options of its own; choose it with them: loss={' or '.join(choices)}"
        return [Problem(where, what, keys)]
    problems = _option_problems(loss, losses[loss.fn].options)
    wrong = None if problems else contradiction(loss.options)
    if wrong is not None:
        together, what = wrong
        names = together.split()
        shown = [f"loss.{name}={show(loss.options[name])}" for name in names]
        problems.append(Problem(" ".join(shown), what, tuple(f"loss.{name}" for name in names)))
    return problems


def _option_problems(loss: LossSettings, names: Sequence[str]) -> list[Problem]:
    """Options that the package's loss does not take, or that are out of range. names: of its own
    options.
    """
    problems = []
    known = [f"loss.{name}" for name in names]
    for name, value in loss.options.items():
        key = f"loss.{name}"
        if name in names:
            hint = LOSS_OPTIONS[name]
            try:
                convert(value, hint)
            except ValueError:
                problems.append(Problem(f"{key}={show(value)}", need(value, hint), (key,)))
        elif name in LOSS_OPTIONS:
            problems.append(Problem(key, f"unknown key; {loss.fn} does not take it", (key,)))
        else:
            problems.append(Problem(key, "unknown key" + did_you_mean(key, known), (key,)))
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
        taken = loss.options_for(set(options_of(fn)))
        check_options(fn, taken)
    except ValueError as error:
        return [Problem(where, line, keys) for line in str(error).splitlines()]
    problems = []
    for name in sorted(set(loss.options) - set(taken)):
        value = loss.options[name]
        is_published = any(value == options.get(name) for options in published)
        if value is not None and not is_published:
            key = f"loss.{name}"
            problems.append(Problem(f"{key}={show(value)}", f"{loss.fn} does not take it", (key,)))
    return problems
