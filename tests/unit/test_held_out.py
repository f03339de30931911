"""eval.sets: named sets of held-out prompts, from the command line to prompts by number."""

import json
import re

import pytest
import torch

from llamarl.comm.groups import World
from llamarl.config.command_line import ConfigError, compose_config
from llamarl.config.conversion import load_config, save_config, to_values
from llamarl.config.rules import check
from llamarl.errors import BadInput
from llamarl.inference.sampler import sample_keys
from llamarl.launch.checks import check_inputs
from llamarl.launch.identity import Identity, differences
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory
from llamarl.launch.scorers import reward_kinds
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.observe.columns import COLUMNS
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.routing import ByOwnReward
from llamarl.scoring.scorer import Scorer, site_alone, text_item
from llamarl.tasks.parts import APART, EvalSet, HeldOut, numbered, set_of
from llamarl.types import Outcome
from llamarl.words.choices import OWN_COLUMNS
from tests.built_tasks import build_task


def write(file, count, prompt="prompt"):
    rows = [{prompt: f"{n}*", "answer": str(n), "more": n} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", 5)


def job_of(*overrides, sets="", remembered=None):
    given = [f"eval.sets={{{sets}}}"] if sets else []
    config = compose_config([*overrides, *given])
    directory = RunDirectory(None, None)
    options = {} if remembered is None else {"remembered": remembered}
    return Job(config, World(0, 1, torch.device("cpu")), directory, **options)


def two_sets(rows):
    sums = "sums: {kind: addition, num_prompts: 2}"
    return f"{sums}, mine: {{kind: jsonl, path: {rows}, max_prompt_tokens: 16}}"


def test_a_set_has_what_its_kinds_file_says_and_as_many_prompts_as_the_task(rows, tmp_path):
    config = compose_config(["eval.num_prompts=7", f"eval.sets={{{two_sets(rows)}}}"])
    sums, mine = config.eval.sets["sums"], config.eval.sets["mine"]
    assert (sums.num_prompts, sums.prompts.chat, sums.prompts.max_prompt_tokens) == (2, False, 16)
    keys = (mine.prompts.prompt_key, mine.prompts.answer_key)
    assert (mine.num_prompts, *keys) == (7, "prompt", "answer")
    assert config.longest == config.longest_asked == 16 + config.max_new_tokens
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    by_keys = ["eval.sets.sums.kind=addition", "eval.sets.sums.num_prompts=2"]
    assert compose_config(by_keys).eval.sets["sums"] == sums


def test_a_longer_prompt_of_a_set_has_room_in_the_engine_and_none_in_training(rows):
    longer = f"a: {{kind: jsonl, path: {rows}, max_prompt_tokens: 512}}"
    config = compose_config([f"eval.sets={{{longer}}}"])
    assert config.longest_asked == 512 + config.max_new_tokens
    assert config.longest_keys == "eval.sets.a.max_prompt_tokens + max_new_tokens"
    assert config.longest == 16 + config.max_new_tokens
    with pytest.raises(BadInput, match=r"eval.sets.a.max_prompt_tokens \+ max_new_tokens = 518"):
        check_inputs(job_of(sets=longer).inputs)


@pytest.mark.parametrize(
    "sets, what",
    [
        ("{a: {kind: additoin}}", "eval.sets.a.kind=additoin"),
        ("{a: {kind: jsonl}}", "required: set eval.sets.a.path"),
        ("{a: {kind: jsonl, path: nowhere.jsonl}}", "no such file: nowhere.jsonl"),
        ("{a: {kind: addition, weight: 1}}", "eval.sets.a.weight"),
        ("{a b: {kind: addition}}", "a set's name has letters"),
        ("{accuracy: {kind: addition}}", "eval/accuracy is a metric of the task's own"),
    ],
)
def test_a_wrong_set_is_told_by_its_key(sets, what):
    with pytest.raises(ConfigError) as refused:
        compose_config([f"eval.sets={sets}"])
    assert what in str(refused.value)


def test_every_column_of_the_tasks_own_is_no_sets_name():
    own = {
        column.removeprefix("eval/") for column in COLUMNS if re.match("eval/[a-z_0-9]+$", column)
    }
    assert own <= set(OWN_COLUMNS)


def test_without_prompts_of_its_own_the_task_gives_the_sets_no_number(rows):
    with pytest.raises(ConfigError, match="eval.sets.a.num_prompts=0"):
        compose_config(["eval.num_prompts=0", "eval.sets={a: {kind: addition}}"])
    job = job_of("eval.num_prompts=0", sets="a: {kind: addition, num_prompts: 3}")
    assert job.inputs.eval_sets == (EvalSet("a", APART, 3),)
    assert job.inputs.eval_due(0) and job.config.is_evaluated


def test_what_needs_an_answer_asks_it_of_every_set(rows):
    sets = f"eval.sets={{a: {{kind: jsonl, path: {rows}, answer_key: null}}}}"
    with pytest.raises(ConfigError, match="eval.sets.a.answer_key=null reward.fn=null"):
        compose_config([sets])
    compose_config([sets, "reward.fn=tests.launching:unhurried"])
    with pytest.raises(ConfigError, match="eval.target=0.5 eval.num_prompts=0"):
        one = "eval.sets={a: {kind: addition, num_prompts: 3}}"
        compose_config(["eval.num_prompts=0", "eval.target=0.5", one])


def test_prompts_are_numbered_set_after_set_and_share_no_random_numbers(rows):
    job = job_of("eval.num_prompts=3", sets=two_sets(rows))
    check_inputs(job.inputs)
    assert check(job.config, 1) == []
    names = [(one.name, one.count) for one in job.inputs.eval_sets]
    assert names == [("", 3), ("sums", 2), ("mine", 3)]  # of mine as many as of the task
    numbers = list(job.inputs.eval_prompts)
    assert numbers == [0, 1, 2, APART, APART + 1, 2 * APART, 2 * APART + 1, 2 * APART + 2]
    keys = sample_keys(torch.tensor([[7, 2, number, 0] for number in numbers]))
    assert len(set(keys.tolist())) == len(numbers)
    texts = [prompt.text for prompt in job.inputs.eval_prompts.values()]
    own = [job.inputs.task.eval_prompt(j).text for j in range(3)]
    assert texts == [*own, *own[:2], "0*", "1*", "2*"]  # all of a file are held out, in its order
    assert job.inputs.held_out.prompt(2 * APART + 1).meta == {
        "answer": "1",
        "more": 1,
        "eval_set": "mine",
        "part_reward": "llamarl.tasks.rewards:exact_match",
    }
    assert job.inputs.eval_prompts[0].meta.keys() == {"answer"}
    assert set_of(job.inputs.eval_sets, APART + 1).name == "sums"


def test_a_set_without_prompts_that_fit_is_told(rows):
    one = f"a: {{kind: jsonl, path: {rows}, max_prompt_tokens: 1}}"
    with pytest.raises(BadInput, match="eval.sets.a: has no held-out prompts of at most"):
        check_inputs(job_of(sets=one).inputs)


def test_a_set_that_cannot_be_read_is_told_by_name(tmp_path):
    file = write(tmp_path / "rows.jsonl", 5, prompt="question")
    one = f"a: {{kind: jsonl, path: {file}, max_prompt_tokens: 16}}"
    with pytest.raises(BadInput, match=r"eval.sets.a: (?s:.*)no key"):
        check_inputs(job_of(sets=one).inputs)


def test_the_rows_of_a_set_are_looked_at_by_whoever_does_so_for_all_ranks(rows):
    asked = []

    def remembered(key, find):
        asked.append(key)
        return find(lambda: None)

    job = job_of(sets=two_sets(rows), remembered=remembered)
    assert len(job.inputs.held_out.sets) == 3
    assert len(asked) == 2  # the rows of the file, and all rows together; sums are made of no file


def test_fingerprints_tell_changed_sets_and_are_as_ever_without(rows, tmp_path):
    def fingerprints(sets=""):
        inputs = job_of("eval.num_prompts=3", sets=sets).inputs
        return inputs.prompt_fingerprints["held-out prompts"]

    task = build_task("addition", load_tokenizer(tiny_directory()), chat=False)
    plain = fingerprints()
    assert plain == HeldOut(task, {}, {"": 3}).fingerprint and plain.startswith("3, rows ")
    known = {plain, fingerprints(two_sets(rows)), fingerprints("sums: {kind: addition}")}
    write(tmp_path / "rows.jsonl", 4)
    known.add(fingerprints(two_sets(rows)))
    assert len(known) == 4


def test_a_resume_with_other_sets_is_refused_as_with_other_held_out_prompts(rows):
    identities = []
    for sets in ("", two_sets(rows)):
        job = job_of("eval.num_prompts=3", sets=sets)
        made = Identity(
            config=to_values(job.config),
            prompts=job.inputs.prompt_fingerprints,
            reward="r",
            models={},
            kept=[],
            adapters={"rank": 0},
        )
        identities.append(made)
    before, after = identities
    assert differences(before, before) == []
    for old, new in ((before, after), (after, before)):
        (difference,) = differences(old, new)
        assert difference.permit == "data" and difference.refuses
        assert difference.what.startswith("other held-out prompts: eval.sets.")


def test_a_set_of_plain_prompts_is_refused_where_rewards_read_turns(rows, monkeypatch):
    given = ("task=jsonl", f"task.path={rows}", "task.max_prompt_tokens=30")
    job = job_of(*given, sets="sums: {kind: addition}")
    check_inputs(job.inputs)  # there is no template
    monkeypatch.setattr(job.inputs.tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(BadInput, match="eval.sets.sums.chat=false task.chat=true"):
        check_inputs(job.inputs)


class Always(Scorer):
    """A scorer whose score is its own, once an item is released."""

    def __init__(self, name, value):
        self.name = name
        self._value = value
        self._items = []
        self.released = []

    @property
    def pending(self):
        return len(self._items)

    def submit(self, key, item):
        self._items.append(key)

    def release(self, keys):
        self.released.append(list(keys))

    def poll(self):
        done, self._items = self._items, []
        return [(key, Outcome("score", self._value, "")) for key in done]

    def close(self):
        self._items.clear()


def test_the_reward_of_its_own_kind_scores_a_prompt_and_the_main_one_all_else():
    scorer = ByOwnReward(Always("main", 1.0), {"own": Always("own", 2.0)})
    metas = [
        {"part_reward": "main", "part": "a"},
        {"part_reward": "own", "eval_set": "a"},
        {"part_reward": "main", "eval_set": "b"},
        {},
    ]
    for key, meta in enumerate(metas):
        scorer.submit(key, text_item("", "", meta))
    assert scorer.pending == 4 and scorer.name == "main"
    scorer.release([0, 1, 2, 3])
    assert [one.released for one in scorer._scorers] == [[[0, 2, 3]], [[1]]]
    scores = {key: outcome.value for key, outcome in scorer.poll()}
    assert scores == {0: 1.0, 1: 2.0, 2: 1.0, 3: 1.0}
    assert scorer.pending == 0
    scorer.release([0, 1])  # of what was scored by itself
    assert [one.released for one in scorer._scorers] == [[[0, 2, 3]], [[1]]]


def by_own_reward(job):
    """Whether sets are scored each by a reward of its own."""
    (kind,) = reward_kinds(job.inputs)
    scorer = kind.make(site_alone(torch.device("cpu"))).scorer
    return isinstance(scorer, ByOwnReward) and isinstance(scorer._main, RewardPool)


def test_only_a_reward_that_nobody_named_is_each_sets_own(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "1+1?", "answer": "2\n#### 2"}) + "\n")
    sets = f"g: {{kind: gsm8k, path: {file}, max_prompt_tokens: 100}}"
    job = job_of(sets=sets)
    assert by_own_reward(job)
    named = job_of("reward.fn=llamarl.tasks.rewards:exact_match", sets=sets)
    assert not by_own_reward(named)
    same = job_of(sets="sums: {kind: addition}")
    assert not by_own_reward(same)


def test_a_run_without_prompts_to_ask_has_no_sets():
    assert numbered({"": 0}) == () and numbered({"": 2}) == (EvalSet("", 0, 2),)
    assert job_of("eval.every=0", sets="a: {kind: addition}").inputs.eval_prompts == {}
