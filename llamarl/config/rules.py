"""What no single value of a configuration shows: values, files and ranks that cannot work together,
each with the remedy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from llamarl.config.conversion import to_values
from llamarl.config.eval_rules import eval_rules, find_set_names
from llamarl.config.files import CONF_DIR, EVAL_SETS, sections
from llamarl.config.findings import Findings, Problem
from llamarl.config.hints import convert, did_you_mean, need
from llamarl.config.loss_options import LOSS_OPTIONS, declarations, declares
from llamarl.config.placement import find_placement
from llamarl.config.reward_rules import comparing_judges, reward_rules
from llamarl.config.rewards import (
    EncoderSourceSettings,
    JudgeSourceSettings,
    ModelSourceSettings,
)
from llamarl.config.schema import START, Config, LossSettings
from llamarl.config.search_rules import Rule, replay_rules, schedule_rules, temperature_rules
from llamarl.config.victim import ModelVictimSettings, victim_rules
from llamarl.words.urls import url_problem


def check(
    config: Config,
    world_size: int,
    local_world_size: int | None = None,
    *,
    attacks: bool = False,
) -> list[Problem]:
    """What cannot work together, or with this many ranks and these files. attacks: the recipe puts
    completions to a victim.
    """
    found = Findings(to_values(config))
    if not find_set_names(config, found):
        return found.problems  # what else is wrong is told by keys, which such names do not make
    started = world_size
    world_size = config.ranks or started
    if config.ranks is not None:
        local_world_size = None  # of a cluster that nothing is known of
    num_hosts = -(-world_size // (local_world_size or world_size))
    rules = [
        *_dry_run_rules(config, started),
        *_memory_rules(config, num_hosts),
        *_ahead_rules(config),
        *_learning_rules(config),
        *temperature_rules(config),
        *_reference_rules(config),
        *replay_rules(config),
        *victim_rules(config.victim, attacks=attacks, compared=comparing_judges(config)),
    ]
    find_placement(config, world_size, found)
    for keys, is_broken, remedy in rules:
        if is_broken:
            found.add(remedy, *keys.split())
    if config.generator.kind == "vllm":
        from llamarl.inference.vllm_engine import vllm_problem  # imports torch, so only for vLLM

        if what := vllm_problem():
            found.add(what, "generator.kind")
    files = {f"task.{name}": getattr(config.task, name, None) for name in ("path", "eval_path")}
    for name, one in config.eval.sets.items():
        files[f"{EVAL_SETS}.{name}.path"] = getattr(one, "path", None)
    files["model.path"] = config.model.path and f"{config.model.path}/config.json"
    victim = config.victim.path if isinstance(config.victim, ModelVictimSettings) else None
    files["victim.path"] = victim and f"{victim}/config.json"
    critic = config.trainer.critic.path
    files["trainer.critic.path"] = critic and f"{critic}/config.json"
    for key, part in config.reward_parts.items():
        if isinstance(part, ModelSourceSettings | EncoderSourceSettings):
            files[f"{key}.path"] = f"{part.path}/config.json"
        elif isinstance(part, JudgeSourceSettings):
            files[f"{key}.template"] = part.template
    files["eval.base"] = config.eval.base and f"{config.eval.base}/config.json"
    for key, embedder in config.embedders.items():
        files[key] = None if embedder == START else f"{embedder}/config.json"
    if config.gold is not None and config.gold.kind == "model":
        files["eval.gold"] = f"{config.gold.path}/config.json"
    for key, file in files.items():
        if file and not Path(file).exists():
            found.add(f"no such file: {Path(file)}", key)
    if config.resume not in ("auto", "never") and not Path(config.resume).is_dir():
        found.add("no such directory; need auto, never or a checkpoint's directory", "resume")
    _find_credentials(config, found)
    _find_loss(config.loss, found)
    return found.problems


def _dry_run_rules(c: Config, started: int) -> list[Rule]:
    """Rules about ranks that are not there. started: those that are."""
    return [
        (
            "ranks dry_run",
            c.ranks is not None and not c.dry_run,
            "ranks that are not there cannot run; +dry_run=true shows what they would hold, and "
            "torchrun --nproc-per-node starts them",
        ),
        (
            "ranks",
            c.ranks is not None and started > 1,
            f"this dry run has {started} ranks already; start it in one process, without torchrun",
        ),
    ]


def _memory_rules(c: Config, num_hosts: int) -> list[Rule]:
    """Rules about the generator's slots, cache and unfinished completions, about memory that
    executors share, and about how weights travel.
    """
    g = c.generator
    t, transport = c.trainer, c.weights.transport
    has_8bit_moments = t.optimizer == "adamw8bit"
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
            g.cache_tokens is not None and g.cache_tokens < c.longest_asked,
            f"does not hold one sequence of {c.longest_keys}; "
            f"need at least {c.longest_asked}, or null",
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


def _ahead_rules(c: Config) -> list[Rule]:
    """Rules about max_lag, overcommit and its governor, about what a run goes on with, and about
    when it ends.
    """
    g = c.governor
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
            "their rules are for a bounded lag; a number of groups, or auto: two batches on their "
            "way",
        ),
        (
            "governor.start max_lag",
            unbounded and g.start is not None,
            "no rule moves overcommit without a bound; governor.start=null, or max_lag=1",
        ),
        (
            "governor.most max_lag",
            unbounded and g.most is not None,
            "no rule moves overcommit without a bound; governor.most=null, or max_lag=1",
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
        *eval_rules(c),
        *reward_rules(c),
    ]


def _find_credentials(c: Config, found: Findings) -> None:
    """Urls or keys of judges that cannot be used. The values are not shown: they may be secret."""
    for key, judge in c.reward_parts.items():
        if judge.kind != "judge":
            continue
        what = url_problem(judge.url)
        if what is not None:
            found.problems.append(Problem(f"{key}.url", what, (f"{key}.url",)))
        variable = judge.api_key_env
        if variable is not None and not variable.isidentifier():
            what = "is no name of an environment variable; export the key there, and give the name"
            found.problems.append(Problem(f"{key}.api_key_env", what, (f"{key}.api_key_env",)))


def _learning_rules(c: Config) -> list[Rule]:
    """Rules about advantages, the critic, adapters and schedules."""
    t, fn = c.trainer, c.loss.fn
    adapts, decays = t.lora.rank > 0, t.decay_steps is not None
    by_token = t.advantages == "gae"
    published = _published_losses().items()
    by_token_too = [
        name for name, sets in published if declares(str(sets["fn"]), "token_advantages")
    ]
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
            f"group_mean, or loss={' or '.join(by_token_too)}",
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
        (
            "trainer.critic.trunk trainer.advantages",
            t.critic.trunk == "own" and not by_token,
            "nothing asks a value model: its values are for trainer.advantages=gae; "
            "or trainer.critic.trunk=shared",
        ),
        (
            "trainer.critic.path trainer.critic.trunk",
            t.critic.path is not None and t.critic.trunk == "shared",
            "a head on the policy's trunk starts as no other model; "
            "trainer.critic.trunk=own, or trainer.critic.path=null",
        ),
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
            t.decay_steps is not None and t.decay_steps + t.warmup_steps > c.max_steps > 0,
            "warm-up and decay are longer than the run",
        ),
        *schedule_rules(c),
    ]


def _reference_rules(c: Config) -> list[Rule]:
    """Rules about the reference, and about what compares with it."""
    kind = c.reference.kind
    absent, resets = kind == "none", kind == "reset"
    return [
        (
            "reference.kind trainer.lora.rank",
            kind == "adapters_off" and c.trainer.lora.rank == 0,
            "is the trainer's weights without their adapters, and there are none: every weight is "
            "trained; trainer.lora.rank=16, or reference=frozen",
        ),
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
        *_reference_stream_rules(c),
    ]


def _reference_stream_rules(c: Config) -> list[Rule]:
    """Rules about a reference that reads completions while they are sampled."""
    r = c.reference
    if not r.stream:
        return []
    if r.kind == "reset":
        why = (
            "the version that scores a completion is that of its newest token, which is not known "
            "while it is sampled; reference=frozen, or reference.stream=false"
        )
        return [("reference.stream reference.kind", True, why)]
    return [
        (
            "reference.stream generator.kind",
            c.generator.kind == "vllm",
            "vLLM does not tell what it samples before a completion has ended; "
            "generator=native, or reference.stream=false",
        ),
        (
            "reference.stream offload",
            c.offload,
            "executors take turns on the device, so that none reads while another samples; "
            "offload=false, or reference.stream=false",
        ),
        (
            "reference.chunk_tokens",
            r.chunk_tokens is not None and r.chunk_tokens >= c.longest,
            "no completion has as many tokens and one more, so none would be read before it ends; "
            f"at most {c.longest - 1}, or null",
        ),
        (
            "reference.cache_tokens",
            r.cache_tokens is not None and r.cache_tokens < c.longest,
            "does not hold one sequence of task.max_prompt_tokens + max_new_tokens; "
            f"need at least {c.longest}, or null",
        ),
    ]


@functools.cache
def _published_losses() -> dict[str, Mapping[str, object]]:
    """What `loss=NAME` sets in the section `loss`, by name: the files of conf/loss."""
    files = sorted((CONF_DIR / "loss").glob("*.yaml"))
    return {file.stem: sections(OmegaConf.load(file))["loss"] for file in files}


def _find_loss(loss: LossSettings, found: Findings) -> None:
    """A loss that does not exist, or options that it does not take or that cannot be."""
    losses, published = declarations(), _published_losses()
    if ":" in loss.fn:
        _find_own_loss(loss, found)
    elif loss.fn not in losses and loss.fn not in published:
        near = did_you_mean(loss.fn, [*published, *losses])
        found.add(f"need {' or '.join(losses)} or module:function{near}", "loss.fn")
    elif loss.fn not in losses or not loss.options.keys() >= set(losses[loss.fn].options):
        choices = [name for name in published if loss.fn in (name, published[name]["fn"])]
        choice = f"loss={' or '.join(choices)}"
        found.add(f"has options of its own; choose it with them: {choice}", "loss.fn")
    else:
        _find_options(loss, losses[loss.fn].options, found)


def _find_options(loss: LossSettings, taken: Sequence[str], found: Findings) -> None:
    """Options that the package's loss does not take, or that are out of range or contradict each
    other. taken: the names of its own.
    """
    all_fit = True
    for name, value in loss.options.items():
        key = f"loss.{name}"
        hint = LOSS_OPTIONS.get(name)
        if name in taken:
            try:
                convert(value, hint)
            except ValueError:
                found.add(need(value, hint), key)
                all_fit = False
            continue
        why = f"; {loss.fn} does not take it"
        if hint is None:
            why = did_you_mean(key, [f"loss.{name}" for name in taken])
        found.problems.append(Problem(key, f"unknown key{why}", (key,)))
    if not all_fit:
        return
    low = _bound(loss, "ratio_mask_low") or 0
    high = _bound(loss, "ratio_mask_high") or math.inf
    cap = _bound(loss, "ratio_cap") or math.inf
    clip = _bound(loss, "clip_high")
    if clip is None:
        clip = -math.inf
    is_mean = loss.options.get("max_tokens") is None or loss.options.get("normalize") == "tokens"
    if low >= high:
        what = "masks every ratio; the low bound must be below the high one"
        found.add(what, "loss.ratio_mask_low", "loss.ratio_mask_high")
    if cap <= 1 + clip:
        what = f"a cap at or below 1 + clip_high = {1 + clip:g} leaves nothing to clip"
        found.add(f"{what}; raise it, or null", "loss.ratio_cap", "loss.clip_high")
    if not is_mean:
        what = "a constant takes the place of the mean; normalize=tokens, or max_tokens=null"
        found.add(what, "loss.max_tokens", "loss.normalize")


def _bound(loss: LossSettings, option: str) -> float | None:
    """Returns the number that an option is; None where it is null, or not an option of the loss."""
    value = loss.options.get(option)
    return value if isinstance(value, int | float) else None


def _find_own_loss(loss: LossSettings, found: Findings) -> None:
    """Check a user's loss function. The options of the chosen file in conf/loss are still set
    beside it: ignore those.
    """
    from llamarl.learning.losses import (  # imports torch, so only here
        check_options,
        options_of,
        resolve_loss,
    )

    try:
        fn = resolve_loss(loss.fn)
        taken = loss.options_for(set(options_of(fn)))
        check_options(fn, taken)
    except ValueError as error:
        for line in str(error).splitlines():
            found.add(line, "loss.fn")
        return
    for name, value in loss.options.items():
        published = [options.get(name) for options in _published_losses().values()]
        if name not in taken and value is not None and value not in published:
            found.add(f"{loss.fn} does not take it", f"loss.{name}")
