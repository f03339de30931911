"""Which directory a run has, whether it may go on from what is there, and what all ranks do
together to find out.
"""

import dataclasses
import errno
import itertools
import json
import logging
import os
import re
import shutil
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers.utils import chat_template_utils

from llamarl.checkpoint import manifest
from llamarl.checkpoint.checkpointer import Checkpointer, verify
from llamarl.comm.groups import World
from llamarl.config.command_line import compose_config
from llamarl.config.conversion import load_config
from llamarl.disk import files
from llamarl.disk.files import DirectoryLock, replace_text
from llamarl.errors import CheckpointError, InUse, RunDirectoryError
from llamarl.inference.partials import pack
from llamarl.inference.requests import Partial
from llamarl.inference.sampler import SamplingParams
from llamarl.launch import identity as identity_module
from llamarl.launch import run_directory, run_files
from llamarl.launch.identity import identity_of
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory, open_run
from llamarl.launch.start import _announce
from llamarl.models.directory import model_digest, weights_digest
from tests.build.control import lone_control
from tests.build.model_directory import change_json, copy_tiny
from tests.scorers import write_encoder, write_scorer

WORLD = World(0, 1, torch.device("cpu"))
IN_WORK = range(8)  # tickets


@pytest.fixture
def data(tmp_path):
    """201 sums, of which eval.num_prompts are held out; all but one prompt are of six tokens."""
    sums = [(100, 100), *product(range(10, 30), range(10, 20))]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(row(a, b) for a, b in sums))
    return file


def row(a, b):
    values = {"prompt": f"{a}+{b}=", "question": f"{b}+{a}=", "answer": str(a + b), "other": str(a)}
    return json.dumps(values) + "\n"


@pytest.fixture
def job(data, tmp_path, monkeypatch):
    """Makes jobs on these sums, in one directory of their own, that go on where there is something
    to go on with.
    """
    monkeypatch.chdir(tmp_path)

    def make(*overrides):
        given = dict(text.split("=", 1) for text in overrides)
        common = {
            "task": "jsonl",
            "task.path": data,
            "task.chat": "false",
            "task.max_prompt_tokens": "16",
            "eval.num_prompts": "20",
            "run_dir": tmp_path / "run",
            "resume": "auto",
            "timeout_s": "60",
            "stop_s": "0.3",
        }
        config = compose_config([f"{k}={v}" for k, v in (common | given).items()])
        return Job(config, WORLD, RunDirectory(tmp_path, None))

    return make


def opened(job, world=WORLD):
    identity = identity_of(job.inputs) if world.rank == 0 else None
    return open_run(job.config, world, job.inputs.prompt_fingerprints, identity, job.inputs.prompts)


def refusal(job, world=WORLD):
    """What is said of a job that may not have its directory."""
    with pytest.raises(RunDirectoryError) as refused:
        opened(job, world)
    return str(refused.value)


def a_checkpoint(job, step=3):
    """As a run of this job leaves one: its identity, and a completion under way of each ticket in
    work.
    """
    options = {"keep": 2, "control": lone_control()}
    expected = [("controller", 0), ("generator", 0)]
    checkpointer = Checkpointer(job.config.run_dir, expected=expected, **options)
    begun = [
        Partial(
            stream=0,
            ticket=ticket,
            sample_index=0,
            prompt_ids=job.inputs.prompts[ticket].prompt_ids,
            token_ids=torch.tensor([5]),
            generator_logprobs=torch.zeros(1),
            policy_versions=torch.tensor([3]),
            params=SamplingParams(6),
        )
        for ticket in IN_WORK
    ]
    identity = dataclasses.asdict(identity_of(job.inputs))
    checkpointer.save_part(step, "controller", 0, {"identity": identity, "ledger": {"choices": []}})
    checkpointer.save_part(step, "generator", 0, pack(begun))
    checkpointer.pump()
    return checkpointer.folder / f"step_{step}"


# --- what is said of it ---


def test_num_epochs_are_so_many_steps_over_the_rows_that_are_trained_on(job, capsys):
    """181 rows twice are 362 prompts, and 45 steps of 8 are 360."""
    made = job("num_epochs=2", "groups_per_step=8", "trainer.warmup_steps=45")
    assert (made.config.max_steps, made.inputs.config.max_steps) == (46, 46)
    assert made.files.config.max_steps == made.placement.config.max_steps == 46
    _announce(made)
    said = "steps    46: 2 passes over 181 rows, 8 a step"
    assert said in capsys.readouterr().out.splitlines()
    with pytest.raises(ValueError, match="is 46 steps, .* no room for trainer.warmup_steps=46"):
        job("num_epochs=2", "groups_per_step=8", "trainer.warmup_steps=46")


def test_the_first_line_of_a_run_names_the_loss_as_it_was_chosen(job, capsys):
    _announce(job("loss=cispo"))
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "llamarl  tiny on jsonl, 8 x 8 completions a step, cispo"


# --- the same run, and no other ---


def test_the_same_run_goes_on_also_from_data_that_were_moved(job, data, tmp_path):
    path = a_checkpoint(job())
    for other in (job(), job("eval.every=0"), job("lr=1e-3", "max_steps=7", "reward.timeout_s=1")):
        run = opened(other)
        assert run.resume_from == path and run.stale_tickets == frozenset()
        run.release()
    moved = data.rename(tmp_path / "moved.jsonl")
    assert opened(job(f"task.path={moved}")).resume_from == path


@pytest.mark.parametrize(
    "override, which",
    [
        ("eval.num_prompts=5", "training prompts and held-out prompts"),
        ("task.answer_key=other", "training prompts and held-out prompts"),
        ("task.max_prompt_tokens=7", "training prompts"),
    ],
)
def test_other_prompts_are_refused_by_the_key_that_made_them(job, override, which):
    key, _, value = override.partition("=")
    path = a_checkpoint(job())
    message = refusal(job(override))
    assert f"{path}: this would be another run" in message and f"other {which}: {key}: " in message
    assert f"in the checkpoint, {value} now" in message and "resume_with_other=[data]" in message


def change(data, number, text):
    lines = data.read_text().splitlines(keepends=True)
    lines[number : number + 1] = text
    data.write_text("".join(lines))


@pytest.mark.parametrize(
    "text",
    [[], [row(10, 17).replace("27", "28")]],
    ids=["removed", "another answer"],
)
def test_changed_data_under_the_same_path_are_refused(job, data, text):
    """Any one row of all, also outside of the sample whose token ids are looked at."""
    a_checkpoint(job())
    change(data, 7, text)
    said = refusal(job())
    assert "the data itself has changed, or the tokenizer or chat template" in said


def test_another_chat_template_is_refused_though_all_rows_are_the_same(job):
    a_checkpoint(job())
    other = job("task.chat=true")
    other.inputs.tokenizer.chat_template = "{{ messages[-1]['content'] }}\n"
    changed = "task.chat: false in the checkpoint, true now"
    assert f"other training prompts and held-out prompts: {changed}" in refusal(other)


def test_a_template_that_writes_the_date_shows_the_same_prompts_on_the_next_day(
    job, tmp_path, monkeypatch
):
    """Else it would go on as another run, and one over midnight would mix the prompts of two."""
    model = copy_tiny(tmp_path / "model")
    shown = "{{ strftime_now('%d%m%Y') }}+{% for m in messages %}{{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(shown)
    words = ("model=hf", f"model.path={model}", "task.chat=true", "task.max_prompt_tokens=24")

    def today(day):
        clock = SimpleNamespace(now=lambda: datetime(2026, 12, day, 23, 59))
        monkeypatch.setattr(chat_template_utils, "datetime", clock)

    today(30)
    begun = job(*words)
    first = begun.inputs.prompts[0].prompt_ids.tolist()
    assert begun.inputs.tokenizer.decode(first).startswith("26072024+")
    path = a_checkpoint(begun)
    today(31)
    assert begun.inputs.prompts[0].prompt_ids.tolist() == first
    again = job(*words)
    assert opened(again).resume_from == path
    assert again.inputs.prompts[0].prompt_ids.tolist() == first


def test_what_a_run_is_cannot_be_changed_and_all_differences_are_told_at_once(job):
    a_checkpoint(job())
    other = ("group_size=4", "seed=7", "eval.num_prompts=5")
    message = refusal(job(*other, "resume_with_other=[data,reward]"))
    assert "group_size: 8 in the checkpoint, 4 now" in message
    assert "seed: 0 in the checkpoint, 7 now" in message
    assert "resume_with_other" not in message and "model=hf model.path=" in message


def test_another_reward_is_refused_unless_it_is_said(job, caplog):
    path = a_checkpoint(job())
    other = "reward.fn=tests.launching:unhurried"
    said = refusal(job(other, "resume_with_other=[data]"))
    assert "exact_match in the checkpoint, tests.launching:unhurried now" in said
    assert "resume_with_other=[reward]" in said
    with caplog.at_level(logging.WARNING, "llamarl"):
        assert opened(job(other, "resume_with_other=[reward]")).resume_from == path
    assert "step_3 goes on with another reward" in caplog.text
    elsewhere = (f"run_dir={path.parents[1]}-2", f"resume={path}")
    by_name = job("reward.fn=llamarl.tasks.rewards:exact_match", *elsewhere)
    assert opened(by_name).resume_from == path, "the task's own, by its name"


def test_completions_of_other_prompts_are_dropped_counted_and_logged_where_other_data_are_allowed(
    job, data, caplog
):
    first = job()
    path = a_checkpoint(first)
    before, _, _ = data.read_text().partition(f'"{first.inputs.prompts[2].text}"')
    change(data, before.count("\n"), [row(98, 98)])
    with caplog.at_level(logging.WARNING, "llamarl"):
        run = opened(job("resume_with_other=[data]"))
    assert run.resume_from == path and run.stale_tickets == {2}
    assert "unfinished completions of 1 tickets were sampled for other prompts" in caplog.text


@pytest.mark.parametrize("resume", ["auto", "the checkpoint"])
def test_a_run_that_was_begun_in_another_format_is_refused_in_one_sentence(job, resume):
    path = a_checkpoint(job())
    body = manifest.read_manifest(path) | {"format": 4}
    (path / manifest.MANIFEST).write_text(json.dumps({**body, "sha256": manifest.digest_of(body)}))
    words = [] if resume == "auto" else [f"resume={path}"]
    assert refusal(job(*words)) == (
        f"{path / manifest.MANIFEST}: format 4, where this commit of llamarl reads format 1; "
        "finish the run with the commit that began it"
    )


def test_the_config_of_the_checkpoint_counts_and_not_the_file_beside_it(job):
    """A kill while config.yaml was written must not stop a run."""
    path = a_checkpoint(job())
    (path.parents[1] / "config.yaml").write_text("max_steps: [")
    with pytest.raises(ValueError, match="config.yaml: damaged, not YAML"):
        load_config(path.parents[1] / "config.yaml")
    run = opened(job())
    assert run.resume_from == path
    assert load_config(run.path / "config.yaml").run_dir == str(run.path)
    (run.path / "config.yaml").write_text("format: 1\n")
    damaged = "config.yaml *damaged, or of another commit of llamarl: max_steps"
    with pytest.raises(ValueError, match=damaged):
        load_config(run.path / "config.yaml")


# --- what is watched ---


@pytest.mark.parametrize(
    "given, period",
    [
        (["buffer=replay", "loss=tb", "buffer.sync_period=3"], 3),
        (["buffer=replay", "loss=tb", "max_lag=4"], None),
        ([], None),
    ],
)
def test_a_run_without_a_bound_on_lag_is_watched(job, monkeypatch, given, period):
    asked = []

    def build_sinks(*_, free_running, **__):
        asked.append(free_running)
        return []

    monkeypatch.setattr(run_files, "build_sinks", build_sinks)
    run = job(*given)
    run.files.directory = opened(run)
    run.files.writer()
    assert asked == [period]


# --- the models that a run reads ---

OWN_CRITIC = ("loss=ppo", "trainer.advantages=gae", "trainer.critic.trunk=own")
LORA = "trainer.lora.rank=4"
SINGLE = "model.safetensors"
TRUNCATION = {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0}


@pytest.fixture
def base(tmp_path):
    """A model directory of the user's."""
    return copy_tiny(tmp_path / "base")


def of(base, *overrides):
    return ("model=hf", f"model.path={base}", *overrides)


def retrained(base):
    """All weights between attentions a little larger, in place."""
    file = base / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if "mlp" in name or "intermediate" in name:
            tensors[name] = tensors[name] * 1.05
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "given, key",
    [
        ([LORA], "model.path"),
        (["eval.base={base}", "model=tiny", "model.path=null"], "eval.base"),
    ],
)
def test_other_weights_under_what_a_checkpoint_has_not_are_refused_unless_it_is_said(
    job, base, caplog, given, key
):
    given = of(base, *(word.format(base=base) for word in given))
    path = a_checkpoint(job(*given))
    opened(job(*given)).release()
    retrained(base)
    said = refusal(job(*given))
    assert f"another model, {key}={base}: other weights" in said
    assert "resume_with_other=[model]" in said
    with caplog.at_level(logging.WARNING, "llamarl"):
        assert opened(job(*given, "resume_with_other=[model]")).resume_from == path
    assert f"step_3 goes on with another model, {key}={base}: other weights" in caplog.text


def test_every_model_that_a_run_reads_is_told_apart(job, base, tmp_path):
    """By the key that names it: also those that judge, embed, or start a critic."""
    for name in ("critic", "judged"):
        shutil.copytree(base, tmp_path / name)
    write_scorer(tmp_path / "judge")
    write_encoder(tmp_path / "embedder")
    given = {
        "trainer.critic.path": (tmp_path / "critic", OWN_CRITIC),
        "eval.gold": (tmp_path / "judge", ()),
        "eval.base": (tmp_path / "judged", ()),
        "eval.embedder": (tmp_path / "embedder", ("eval.num_samples=2",)),
    }
    for key, (path, words) in given.items():
        words = of(base, *words, f"{key}={path}")
        before = identity_of(job(*words).inputs).models[key]
        retrained(path)
        assert identity_of(job(*words).inputs).models[key] != before, key


DIVERSITY = ("eval.embedder=start", "eval.num_samples=2")


@pytest.mark.parametrize(
    "begun, now",
    [(DIVERSITY, DIVERSITY), ((), ("reference=frozen", "loss.kl_coef=0.1"))],
    ids=["diversity by its weights", "a reference that is asked for later"],
)
def test_what_training_began_with_keeps_its_weights(job, base, begun, now):
    a_checkpoint(job(*of(base, *begun)))
    retrained(base)
    assert "other weights" in refusal(job(*of(base, *now)))


@pytest.mark.parametrize(
    "key, words",
    [("model.path", ()), ("trainer.critic.path", OWN_CRITIC)],
    ids=["policy", "critic"],
)
def test_a_model_of_which_the_checkpoint_has_all_weights_may_be_another_now(
    job, base, caplog, key, words
):
    other = copy_tiny(base.with_name("other"))
    given = (*of(base, *words), f"{key}={other}")
    path = a_checkpoint(job(*given))
    retrained(other)
    with caplog.at_level(logging.WARNING, "llamarl"):
        assert opened(job(*given)).resume_from == path
    unread = "other weights, which are not read; the checkpoint has its own"
    assert f"another model, {key}={other}: {unread}" in caplog.text


def test_a_model_that_was_moved_is_the_same_model(job, base):
    path = a_checkpoint(job(*of(base, LORA)))
    moved = base.rename(base.with_name("moved"))
    assert opened(job(*of(moved, LORA))).resume_from == path


def test_what_is_read_of_any_policys_directory_is_compared(job, base):
    a_checkpoint(job(*of(base)))
    rope = json.loads((base / "config.json").read_text())["rope_parameters"]
    change_json(base / "config.json", rope_parameters=rope | {"rope_theta": 77.0})
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    written_anew = {**tokenizer, "truncation": TRUNCATION}
    (base / "tokenizer.json").write_text(json.dumps(written_anew, indent=4))
    said = refusal(job(*of(base)))
    assert "config.json: rope_theta: " in said and "tokenizer" not in said
    tokenizer["model"]["vocab"]["a new word"] = len(tokenizer["model"]["vocab"])
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "other tokenizer" in refusal(job(*of(base)))


def test_other_stop_tokens_are_another_model(job, base):
    a_checkpoint(job(*of(base)))
    change_json(base / "generation_config.json", eos_token_id=[2, 3])
    assert f"model.path={base}: stop tokens: [2] in the" in refusal(job(*of(base)))


@pytest.mark.parametrize("now", [(), (LORA, "trainer.lora.alpha=3")])
def test_other_adapters_are_refused_by_their_key(job, now):
    a_checkpoint(job(LORA))
    said = refusal(job(*now))
    assert "  trainer.lora." in said and "resume_with_other" not in said


def test_models_are_read_on_rank_0_alone_and_all_ranks_know_what_it_read(job, base, monkeypatch):
    jobs = [job(*of(base, LORA)) for _ in range(2)]
    read = []
    digest = identity_module.weights_digest

    def watched(path):
        read.append(path)
        return digest(path)

    monkeypatch.setattr(identity_module, "weights_digest", watched)
    runs = opened_by_all(jobs)
    assert read == [base]
    assert runs[1].identity == json.loads(json.dumps(runs[0].identity))
    assert runs[1].identity["models"]["model.path"]["weights"] == digest(base)


def test_a_digest_of_weights_sees_every_tensor_and_reads_little_of_any(tmp_path, monkeypatch):
    tensors = {
        "a": torch.arange(300_000.0).view(300, 1000),
        "b": torch.arange(50.0),
        "c": torch.tensor(1.0, dtype=torch.bfloat16),
        "d": torch.zeros(3, 4, 5),
        "e": torch.zeros(0, 4),
    }

    def written(**changed):
        save_file(tensors | changed, tmp_path / SINGLE)
        return weights_digest(tmp_path)

    first = written()
    assert written() == first
    save_file({f"{name}z": value for name, value in tensors.items()}, tmp_path / SINGLE)
    assert weights_digest(tmp_path) != first, "the same numbers under other names"
    others = {
        written(b=torch.arange(50.0) + torch.eye(50)[7]),
        written(c=torch.tensor(1.0078125, dtype=torch.bfloat16)),
        written(d=torch.zeros(3, 5, 4)),
        written(d=torch.zeros(3, 4, 5, dtype=torch.float16)),
        written(e=torch.zeros(0, 5)),
    }
    for row in (0, 150, 299):
        a = tensors["a"].clone()
        a[row, 3] += 1
        others.add(written(a=a))
    assert len(others | {first}) == 9


def test_a_digest_of_a_model_sees_its_config_its_tokenizer_and_its_weights(base):
    digests = {model_digest(base)}
    assert model_digest(base) in digests
    change_json(base / "config.json", rope_theta=77.0)
    digests.add(model_digest(base))
    change_json(base / "tokenizer.json", added_tokens=[])
    digests.add(model_digest(base))
    retrained(base)
    digests.add(model_digest(base))
    assert len(digests) == 4


# --- one directory, one job ---


def test_a_directory_in_use_is_refused_and_free_when_its_job_ends(job):
    first = opened(job())
    said = refusal(job())
    assert re.search(r"run is in use by process \d+ on .+ since .+; wait for its end", said)
    first.release()
    opened(job()).release()


def test_the_last_user_of_a_directory_may_take_a_while_to_end(tmp_path):
    first = DirectoryLock(tmp_path, patience_s=0.0)
    asked = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(DirectoryLock, tmp_path, patience_s=60.0, waiting=asked.set)
        assert asked.wait(60.0) and not second.done()
        first.release()
        second.result(60.0).release()


def test_what_is_in_the_lock_of_a_directory_is_for_people_alone(tmp_path):
    (tmp_path / "lock").write_text("[]")
    first = DirectoryLock(tmp_path, patience_s=0.0)
    (tmp_path / "lock").write_text("")
    with pytest.raises(InUse, match="in use by another process"):
        DirectoryLock(tmp_path, patience_s=0.0)
    first.release()


def test_jobs_that_begin_in_the_same_second_have_a_directory_each(job, monkeypatch):
    """Each has seen that there was none: they make it at once."""
    monkeypatch.setattr(files.time, "strftime", lambda format: "now")
    makes = Path.mkdir
    together = threading.Barrier(4)

    def mkdir(path, *args, **kwargs):
        if path.name == "now":
            together.wait(60.0)
        makes(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: files.new_directory(files.RUNS), range(4)))
    assert sorted(path.name for path in made) == ["now", "now-2", "now-3", "now-4"]


def test_a_job_that_goes_on_sees_what_another_wrote_while_it_waited_for_the_directory(
    job, monkeypatch
):
    """Both are told to go on in a directory that is not there yet; the other is first."""
    late = job()
    lock = run_directory._Opening._lock_directory

    def lock_after_the_other_ended(opening, path):
        a_checkpoint(job())
        lock(opening, path)

    monkeypatch.setattr(run_directory._Opening, "_lock_directory", lock_after_the_other_ended)
    assert opened(late).resume_from.name == "step_3"


def full(*args, code=errno.ENOSPC):
    """A call of the disk that takes nothing; the system then names no file."""
    raise OSError(code, os.strerror(code))


def test_a_full_disk_is_named_with_the_file_and_what_to_do(job, monkeypatch, tmp_path):
    first = opened(job())
    first.release()
    before = (first.path / "config.yaml").read_text()
    monkeypatch.setattr(os, "fsync", full)
    said = refusal(job())
    assert str(first.path / "config.yaml") in said and "make room there, and start again" in said
    assert (first.path / "config.yaml").read_text() == before
    assert not (first.path / "config.yaml.new").exists()
    monkeypatch.setattr(os, "fsync", partial(full, code=errno.EIO))
    with pytest.raises(OSError, match="cannot be written: Input/output error: .*/x'") as refused:
        replace_text(tmp_path / "x", "text")
    assert refused.value.errno == errno.EIO and "room" not in str(refused.value)


def test_a_lock_that_cannot_say_who_has_it_is_a_lock(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        first = DirectoryLock(tmp_path, patience_s=0.0)
    assert "lock: does not say who has it (No space left on device)" in caplog.text
    with pytest.raises(InUse):
        DirectoryLock(tmp_path, patience_s=0.0)
    first.release()


def test_what_an_earlier_run_said_of_its_end_is_gone_when_another_begins(job):
    first = opened(job())
    outcome = first.path / "outcome.json"
    outcome.write_text('{"ended": "stopped"}')
    first.release()
    opened(job())
    assert not outcome.exists()


def alone_on(launcher):
    return World(0, 1, torch.device("cpu"), launcher=launcher)


@pytest.fixture
def starts(monkeypatch):
    """Makes the next job the first of a process."""
    return lambda: monkeypatch.setattr("llamarl.launch.run_directory._jobs", itertools.count())


def test_a_restarted_job_goes_on_in_its_own_directory_and_never_in_anothers(job, starts):
    """Two launches on one machine, whose launcher calls both by the same name; each
    restarted once.
    """
    launches = ((dist.HashStore(), "run_dir=mine"), (dist.HashStore(), "run_dir=null"))
    paths = []
    for launcher, directory in launches * 2:
        starts()
        run = opened(job(directory, "resume=never"), alone_on(launcher))
        assert run.resume_from is None
        paths.append(run.path)
        run.release()
    assert paths[:2] == paths[2:] and paths[0] != paths[1]
    starts()
    said = refusal(job("run_dir=mine", "resume=never"), alone_on(dist.HashStore()))
    assert "holds a run already; go on with resume=auto" in said


def test_the_jobs_of_one_process_have_a_directory_each(job, starts):
    starts()
    launcher = dist.HashStore()
    runs = [opened(job("run_dir=null", "resume=never"), alone_on(launcher)) for _ in range(3)]
    assert len({run.path for run in runs}) == 3


def test_a_refused_directory_is_not_taken_for_its_own_after_a_restart(job, starts):
    a_checkpoint(job())
    launcher = dist.HashStore()
    for _ in range(2):
        starts()
        assert "holds a run already" in refusal(job("resume=never"), alone_on(launcher))


# --- all ranks together ---


def opened_by_all(jobs):
    """What each rank of a world gets, or the error that it ends with."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(index):
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        world = SimpleNamespace(rank=index, size=len(jobs), launcher=None, store=lambda: own)
        try:
            return opened(jobs[index], world)
        except RunDirectoryError as error:
            return str(error)

    for job in jobs:
        job.inputs.prompt_fingerprints  # alone: tokenizers are not safe at their first step
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(rank, range(len(jobs))))


def test_all_ranks_verify_a_share_and_go_on_from_the_same_checkpoint(job):
    path = a_checkpoint(job())
    runs = opened_by_all([job() for _ in range(2)])
    assert {(run.path, run.resume_from) for run in runs} == {(path.parents[1], path)}
    assert runs[0].lock is not None and runs[1].lock is None


def test_damage_that_any_rank_finds_is_told_by_all(job):
    first, second = a_checkpoint(job(), 3), a_checkpoint(job(), 4)
    for file in (second / "generator.rank0.safetensors", first / "controller.rank0.json"):
        whole = bytearray(file.read_bytes())
        whole[-1] ^= 1
        file.write_bytes(whole)
    told = opened_by_all([job() for _ in range(2)])
    assert len(set(told)) == 1 and "no checkpoint is whole" in told[0]


@pytest.fixture
def seen_late(monkeypatch):
    """seen_late(hidden, looks): no rank that waits for a checkpoint sees the file `hidden` of it at
    its first looks, as on a file system that lags behind.
    """

    def hide(hidden: str, looks: int) -> None:
        usual = manifest._unseen_of
        num_looks = Counter()

        def late(path, digest):
            rank = threading.get_ident()
            num_looks[rank] += 1
            return [hidden] if num_looks[rank] <= looks else usual(path, digest)

        monkeypatch.setattr(manifest, "_unseen_of", late)

    return hide


def test_a_checkpoint_that_other_hosts_see_late_is_waited_for_and_not_passed_over(job, seen_late):
    older, newer = a_checkpoint(job(), 3), a_checkpoint(job(), 4)
    seen_late("manifest.json", looks=2)
    runs = opened_by_all([job() for _ in range(2)])
    assert {run.resume_from for run in runs} == {newer}
    assert older.is_dir()


@pytest.mark.slow
def test_a_checkpoint_that_another_host_never_sees_ends_in_an_error_that_names_it(job, seen_late):
    """The older one is not taken instead, for the newer is whole."""
    a_checkpoint(job(), 3)
    newer = a_checkpoint(job(), 4)
    seen_late("trainer.rank0.json", looks=10**9)
    told = opened_by_all([job("timeout_s=4") for _ in range(2)])
    assert len(set(told)) == 1
    assert f"{newer} is whole where rank 0 runs, but after 4 s" in told[0]
    assert f"rank 1 on {socket.gethostname()} does not see trainer.rank0.json" in told[0]


def test_a_rank_sees_a_checkpoint_once_all_that_its_manifest_names_is_there(job):
    path = a_checkpoint(job())
    digest = manifest.digest_of(manifest.read_manifest(path))
    looks = []

    def show_more():
        """Show the manifest at the first look, and the last byte of a part at the second."""
        looks.append(1)
        if len(looks) == 1:
            hidden.rename(path / "manifest.json")
        else:
            part.write_bytes(whole)

    (part,) = path.glob("*.safetensors")
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    hidden = (path / "manifest.json").rename(path.parent / "hidden")
    assert manifest.wait_until_seen(path, digest, patience_s=60, waiting=show_more) == []
    assert len(looks) == 2
    other = "another manifest's"
    unseen = manifest.wait_until_seen(path, other, patience_s=0, waiting=show_more)
    assert unseen == ["manifest.json"]


def test_a_rank_that_reads_other_data_is_named(job, data, tmp_path):
    jobs = [job() for _ in range(2)]
    stale = data.rename(tmp_path / "stale.jsonl")
    data.write_text(stale.read_text())
    change(data, 7, [row(98, 98)])
    jobs[1] = job(f"task.path={stale}")
    jobs[0].inputs.prompt_fingerprints
    told = opened_by_all(jobs)
    assert len(set(told)) == 1 and "rank 1 reads other training prompts" in told[0]


def test_shares_of_a_checkpoint_are_all_of_it_and_each_tells_of_its_progress(job):
    path = a_checkpoint(job())
    (file,) = path.glob("*.safetensors")
    damaged = file.read_bytes()[:-1] + b"?"
    file.write_bytes(damaged)
    steps = []
    found = [verify(path, share=(i, 3), progress=lambda: steps.append(1)) for i in range(3)]
    assert sum(found, []) == verify(path) != [] and len(steps) == 3


def test_a_damaged_checkpoint_that_was_asked_for_by_name_is_refused(job, tmp_path):
    path = a_checkpoint(job())
    (path / "generator.rank0.json").write_text("{}")
    with pytest.raises((CheckpointError, RunDirectoryError), match="generator.rank0.json"):
        opened(job(f"resume={path}", f"run_dir={tmp_path / 'new'}"))
    assert not (tmp_path / "new").exists()
