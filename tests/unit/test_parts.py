"""Prompts: eval.sets, named sets of held-out prompts, from the command line to prompts by number;
parts of a mixture; and rows of files, which are looked at once a run: by one rank, in batches, and
again if they change.
"""

import itertools
import json
import re
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.comm.groups import World
from llamarl.config.command_line import ConfigError, compose_config
from llamarl.config.conversion import load_config, save_config
from llamarl.config.rules import check
from llamarl.errors import BadInput
from llamarl.inference.sampler import sample_keys
from llamarl.launch.checks import check_inputs
from llamarl.launch.reading import FILE, SharedReading
from llamarl.launch.scorers import reward_kinds
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.observe.columns import COLUMNS
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.routing import ByOwnReward
from llamarl.scoring.scorer import Scorer, site_alone, text_item
from llamarl.tasks import list_task
from llamarl.tasks.base import Example, PromptMaker
from llamarl.tasks.files import JsonlExamples, row_to_example
from llamarl.tasks.list_task import (
    Fitting,
    fitting_of,
    from_values,
    here,
    to_values,
    tokenizer_digest,
)
from llamarl.tasks.parts import (
    APART,
    BLOCK,
    EvalSet,
    HeldOut,
    MixtureTask,
    Schedule,
    numbered,
    set_of,
    shares,
)
from llamarl.tasks.rewards import part_reward
from llamarl.tickets.prompts import MixedPrompts, PromptStream, part_of, prompts_of
from llamarl.types import Outcome
from llamarl.words.choices import OWN_COLUMNS
from tests.built_tasks import build_task
from tests.unit.refusals import job


def write(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def numbered_rows(count, prompt="prompt"):
    return [{prompt: f"{n}*", "answer": str(n), "more": n} for n in range(count)]


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", *numbered_rows(5))


@pytest.fixture
def tokenizer():
    return load_tokenizer(tiny_directory())


THREE_SUMS = "a: {kind: addition, num_prompts: 3}"


def job_of(*overrides, sets="", **options):
    return job(*overrides, *([f"eval.sets={{{sets}}}"] if sets else []), **options)


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


def test_every_column_of_the_tasks_own_is_no_sets_name():
    own = {
        column.removeprefix("eval/") for column in COLUMNS if re.match("eval/[a-z_0-9]+$", column)
    }
    assert own <= set(OWN_COLUMNS)


def test_without_prompts_of_its_own_the_task_may_have_sets():
    job = job_of("eval.num_prompts=0", sets=THREE_SUMS)
    assert job.inputs.eval_sets == (EvalSet("a", APART, 3),)
    assert job.inputs.eval_due(0) and job.config.is_evaluated
    assert numbered({"": 0}) == () and numbered({"": 2}) == (EvalSet("", 0, 2),)
    assert job_of("eval.every=0", sets="a: {kind: addition}").inputs.eval_prompts == {}


def test_what_needs_an_answer_asks_it_of_every_set(rows):
    sets = f"eval.sets={{a: {{kind: jsonl, path: {rows}, answer_key: null}}}}"
    with pytest.raises(ConfigError, match="eval.sets.a.answer_key=null reward.fn=null"):
        compose_config([sets])
    compose_config([sets, "reward.fn=tests.launching:unhurried"])


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


@pytest.mark.parametrize(
    "prompt, limit, said",
    [
        ("prompt", 1, "eval.sets.a: has no held-out prompts of at most"),
        ("question", 16, r"eval.sets.a: (?s:.*)no key"),
    ],
)
def test_a_set_that_has_no_prompts_or_cannot_be_read_is_told(tmp_path, prompt, limit, said):
    file = write(tmp_path / "rows.jsonl", *numbered_rows(5, prompt))
    one = f"a: {{kind: jsonl, path: {file}, max_prompt_tokens: {limit}}}"
    with pytest.raises(BadInput, match=said):
        check_inputs(job_of(sets=one).inputs)


def test_the_rows_of_a_set_are_looked_at_by_whoever_does_so_for_all_ranks(rows):
    asked = []

    def remembered(key, find):
        asked.append(key)
        return find(lambda: None)

    job = job_of(sets=two_sets(rows), remembered=remembered)
    assert len(job.inputs.held_out.sets) == 3
    assert len(asked) == 2  # the rows of the file, and all rows together; sums are made of no file


def test_fingerprints_tell_changed_sets_and_are_as_ever_without(rows, tmp_path, tokenizer):
    def fingerprint(sets=""):
        inputs = job_of("eval.num_prompts=3", sets=sets).inputs
        return inputs.prompt_fingerprints["held-out prompts"]

    task = build_task("addition", tokenizer, chat=False)
    plain = fingerprint()
    assert plain == HeldOut(task, {}, {"": 3}).fingerprint and plain.startswith("3, rows ")
    known = {plain, fingerprint(two_sets(rows)), fingerprint("sums: {kind: addition}")}
    write(tmp_path / "rows.jsonl", *numbered_rows(4))
    assert len(known | {fingerprint(two_sets(rows))}) == 4


def test_a_set_of_plain_prompts_is_refused_where_rewards_read_turns(rows, monkeypatch):
    given = ("task=jsonl", f"task.path={rows}", "task.max_prompt_tokens=30")
    job = job_of(*given, sets="sums: {kind: addition}")
    check_inputs(job.inputs)  # there is no template
    monkeypatch.setattr(job.inputs.tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(BadInput, match="eval.sets.sums.chat=false task.chat=true"):
        check_inputs(job.inputs)


class Always(Scorer):
    """A scorer whose score is its own."""

    def __init__(self, name, value):
        self.name, self._value = name, value
        self._items, self.released = [], []

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


@pytest.mark.parametrize(
    "words, kind, is_own",
    [
        ([], "gsm8k", True),
        (["reward.fn=llamarl.tasks.rewards:exact_match"], "gsm8k", False),
        ([], "addition", False),  # it has the task's own
    ],
)
def test_only_a_reward_that_nobody_named_is_each_sets_own(tmp_path, words, kind, is_own):
    sets = "sums: {kind: addition}"
    if kind == "gsm8k":
        file = write(tmp_path / "rows.jsonl", {"question": "1+1?", "answer": "2\n#### 2"})
        sets = f"g: {{kind: gsm8k, path: {file}, max_prompt_tokens: 100}}"
    (made,) = reward_kinds(job_of(*words, sets=sets).inputs)
    scorer = made.make(site_alone(torch.device("cpu"))).scorer
    has_own = isinstance(scorer, ByOwnReward) and isinstance(scorer._main, RewardPool)
    assert has_own == is_own


# --- Parts of a mixture ---

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.floats(1.0, 100.0), min_size=1, max_size=5)
TEMPLATE = "{% for m in messages %}{{ m.content }}={% endfor %}"


@settings(deadline=None, max_examples=30)
@given(weights=WEIGHTS, seed=st.integers(0, 99), block=st.integers(0, 3), count=st.integers(0, 50))
def test_every_block_has_as_many_tickets_of_a_part_as_its_weight_says(weights, seed, block, count):
    schedule = Schedule(weights, seed)
    drawn = Counter(schedule[ticket].part for ticket in range(block * BLOCK, (block + 1) * BLOCK))
    for number, found in ((BLOCK, drawn), (count, shares(weights, count))):
        assert sum(found.values()) == number
        for name, weight in weights.items():
            assert abs(found[name] - number * weight / sum(weights.values())) <= 1


@settings(deadline=None, max_examples=20)
@given(weights=WEIGHTS, seed=st.integers(0, 99), data=st.data())
def test_a_draw_is_a_function_of_its_number_and_numbers_the_parts_tickets(weights, seed, data):
    schedule = Schedule(weights, seed)
    counts = Counter()
    walked = []
    for ticket in range(2 * BLOCK + 5):
        draw = schedule[ticket]
        assert draw.number == counts[draw.part]  # none is left out, none comes twice
        counts[draw.part] += 1
        walked.append(draw)
    asked = data.draw(st.lists(st.integers(0, 2 * BLOCK + 4), max_size=5))
    again = Schedule(dict(weights), seed)  # as after a resumption, on any rank
    assert [again[ticket] for ticket in asked] == [walked[ticket] for ticket in asked]


def test_every_block_and_every_seed_has_an_order_of_its_own():
    """Else a part would meet the same other prompts of its step again and again."""
    orders = set()
    for seed, block in itertools.product(range(2), range(2)):
        schedule = Schedule({"a": 1.0, "b": 2.0}, seed)
        tickets = range(block * BLOCK, block * BLOCK + 100)
        orders.add(tuple(schedule[ticket].part for ticket in tickets))
    assert len(orders) == 4


def test_a_weight_that_no_block_has_a_ticket_for_is_told():
    with pytest.raises(ValueError, match=r"task.parts.b.weight=0.0001: less than one prompt in"):
        Schedule({"a": 1.0, "b": 0.0001}, 0)


def part(kind, weight=1.0, **given):
    return {"kind": kind, "weight": weight, "chat": True, "system_prompt": None} | given


@pytest.fixture
def build(tmp_path, tokenizer):
    file = str(write(tmp_path / "rows.jsonl", *asked("*")))
    tokenizer.chat_template = TEMPLATE

    def build(weight=3.0, **given):
        parts = {
            "sums": part("addition", chat=False, max_prompt_tokens=16),
            "mine": part("jsonl", weight, path=file, max_prompt_tokens=30, **given),
        }
        return build_task("mixture", tokenizer, parts=parts, num_eval=8)

    return build


def asked(mark):
    return [{"prompt": f"{n}{mark}", "answer": "1"} for n in range(20)]


def test_each_part_is_walked_in_its_own_epochs(build):
    task = build()
    stream = prompts_of(task, 5)
    assert isinstance(stream, MixedPrompts)
    texts = {"sums": [], "mine": []}
    for prompt in (stream[ticket] for ticket in range(200)):
        texts[part_of(prompt)].append(prompt.text)
    for name, own in texts.items():
        alone = PromptStream(task.parts[name], 5)
        assert own == [alone[number].text for number in range(len(own))]
    # 18 rows are trained on, each once an epoch.
    rows = task.parts["mine"].num_train
    assert rows == 18 and len(set(texts["mine"][:rows])) == rows


def test_held_out_prompts_come_from_every_part_by_weight(build):
    task = build()
    held = Counter(part_of(task.eval_prompt(j)) for j in range(task.num_eval))
    # A quarter of 8 of the sums; of three quarters the file has a tenth of 20 rows to give.
    assert held == {"sums": 2, "mine": 2}
    trained = {task.train_prompt(i).text for i in range(task.num_train)}
    assert task.num_train == 7600 + 18
    assert not trained & {task.eval_prompt(j).text for j in range(task.num_eval)}


def test_a_parts_prompts_have_the_turns_that_it_was_asked_with(build, tokenizer):
    task = build(system_prompt="9")
    by_part = {part_of(task.eval_prompt(j)): task.eval_prompt(j) for j in range(task.num_eval)}
    assert by_part["sums"].messages == ()  # its chat is false
    assert [turn.role for turn in by_part["mine"].messages] == ["system", "user"]
    assert tokenizer.decode(by_part["mine"].prompt_ids) == f"9={by_part['mine'].text}="


def test_what_it_is_known_by_has_parts_weights_and_rows(build, tmp_path):
    def known(seed=0, **given):
        return prompts_of(build(**given), seed).fingerprint

    first = known()
    others = [known(weight=2.0), known(seed=1), known(system_prompt="1")]
    assert known() == first
    write(tmp_path / "rows.jsonl", *asked("-"))
    assert len({first, *others, known()}) == 5


def test_a_prompts_part_scores_it(build):
    task = build()
    assert task.default_reward == "llamarl.tasks.rewards:exact_match"  # all parts have it
    meta = {"answer": "1.0", "part_reward": "llamarl.tasks.rewards:numeric_match"}
    assert part_reward("", "It is 1.", meta) == 1.0
    meta["part_reward"] = "llamarl.tasks.rewards:exact_match"
    assert part_reward("", "It is 1.", meta) == 0.0


def of_a_group(prompts, completions, metas):
    return [1.0] * len(completions)


def test_parts_with_rewards_of_different_kinds_are_each_scored_by_their_own(tokenizer):
    parts = {
        "sums": part("addition", chat=False, max_prompt_tokens=16),
        "asked": part("questions", chat=False, max_prompt_tokens=64, name="sum", least=1, most=9),
    }
    task = build_task("mixture", tokenizer, parts=parts, num_eval=8)
    assert task.default_reward == "llamarl.tasks.rewards:part_reward"
    scored = {}
    for prompt in (task.eval_prompt(j) for j in range(task.num_eval)):
        said = f"It is {prompt.meta['answer']}."
        scored.setdefault(part_of(prompt), set()).add(part_reward(prompt.text, said, prompt.meta))
    assert scored == {"sums": {0.0}, "asked": {1.0}}  # exact_match, numeric_match
    with pytest.raises(ValueError, match="scores whole groups, which a mixture's parts do not"):
        part_reward("", "", {"part_reward": "tests.unit.test_parts:of_a_group"})


def test_a_digest_is_of_all_parts_or_there_is_none():
    def digests(*pairs):
        """Of parts whose rows are made as they are asked for."""
        parts = {}
        for n, (of_train, of_eval) in enumerate(pairs):
            parts[str(n)] = SimpleNamespace(
                name="on demand",
                default_reward="llamarl.tasks.rewards:exact_match",
                num_train=3,
                num_eval=3,
                train_digest=of_train,
                eval_digest=of_eval,
            )
        task = MixtureTask(parts, dict.fromkeys(parts, 1.0), 2)
        return task.train_digest, task.eval_digest

    assert digests(("a", ""), ("b", "c"))[1] == ""
    told = {digests(("a", "c"), ("b", "c")), digests(("b", "c"), ("a", "c"))}
    assert len(told) == 2 and "" not in set(chain.from_iterable(told))


def test_parts_have_what_their_kinds_files_say(tmp_path):
    parts = "{a: {kind: addition}, b: {kind: questions, weight: 2}}"
    config = compose_config(["task=mixture", f"task.parts={parts}"])
    a, b = config.task.parts["a"], config.task.parts["b"]
    assert (a.weight, a.prompts.max_prompt_tokens, a.prompts.chat) == (1.0, 16, False)
    assert (b.weight, b.prompts.max_prompt_tokens, b.prompts.name) == (2.0, 64, "sum")
    assert config.longest == 64 + 256
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_a_part_that_cannot_be_read_is_told_by_name(build, tokenizer):
    with pytest.raises(ValueError, match=r"task.parts.mine: (?s:.*)no key"):
        build(prompt_key="question")
    with pytest.raises(ValueError, match="task.parts is empty"):
        build_task("mixture", tokenizer, parts={})


# --- Rows are looked at once a run ---

WAIT_S = 60.0


def write_prompts(file, *prompts):
    return write(file, *({"prompt": prompt, "answer": "1"} for prompt in prompts))


PROMPTS = [f"{n // 13 + 1}" * (n % 13 + 1) for n in range(40)]  # <bos> and a token a digit


class Rank(World):
    """A rank of several whose store is one of this process."""

    def __init__(self, rank, size, shared):
        super().__init__(rank, size, device="cpu")
        object.__setattr__(self, "shared", shared)

    def store(self):
        return self.shared if self.size > 1 else None


def alone(*folders):
    return SharedReading(Rank(0, 1, None), folders, WAIT_S)


class Counted:
    """Counts how often the rows are looked at."""

    def __init__(self, reading):
        self._reading = reading
        self.num_finds = 0

    def __call__(self, key, find):
        def counted(progress):
            self.num_finds += 1
            return find(progress)

        return self._reading(key, counted)


def read_task(tokenizer, path, reading=here, **given):
    given = {"max_prompt_tokens": 9, "num_eval": 4} | given
    return build_task("jsonl", tokenizer, path=path, remembered=reading, **given)


def same(one, other):
    digests = [(task.train_digest, task.eval_digest) for task in (one, other)]
    texts = []
    for task in (one, other):
        own = [task.train_prompt(i).text for i in range(task.num_train)]
        texts.append(own + [task.eval_prompt(j).text for j in range(task.num_eval)])
    return digests[0] == digests[1] and texts[0] == texts[1]


@settings(max_examples=30)
@given(
    prompts=st.lists(st.text("0123456789+= \u00e9", min_size=0, max_size=20), max_size=20),
    limit=st.integers(1, 20),
    batch=st.integers(1, 7),
    chat=st.booleans(),
)
def test_a_batch_fits_as_its_prompts_do_one_at_a_time(prompts, limit, batch, chat):
    tokenizer = load_tokenizer(tiny_directory())
    if chat:
        each = "{% for m in messages %}{{ m.content }}={% endfor %}"
        tokenizer.chat_template = "{{ bos_token }}" + each
    maker = PromptMaker(tokenizer, chat=True, system_prompt=None, max_prompt_tokens=limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_task, "BATCH", batch)
        found = fitting_of(maker, [Example(prompt, {}) for prompt in prompts])
    want = [place for place, prompt in enumerate(prompts) if len(maker.ids(prompt)) <= limit]
    assert list(found.places) == want


@settings(max_examples=20)
@given(bits=st.lists(st.booleans(), max_size=50))
def test_a_fitting_is_the_same_as_json(bits):
    places = array("q", [place for place, bit in enumerate(bits) if bit])
    values = json.loads(json.dumps(to_values(Fitting(places, "ab"), len(bits))))
    assert from_values(values, len(bits)) == Fitting(places, "ab")
    with pytest.raises(ValueError, match="examples"):
        from_values(values, len(bits) + 1)


@pytest.fixture
def file(tmp_path):
    return write_prompts(tmp_path / "rows.jsonl", *PROMPTS)


@pytest.fixture
def first(tokenizer, tmp_path, file):
    """A reading that has found the file's rows, and its task."""
    reading = alone(tmp_path)
    task = read_task(tokenizer, file, reading)
    reading.save(tmp_path)
    return reading, task


def test_a_resumed_run_takes_what_was_found(tokenizer, tmp_path, file, first):
    _, task = first
    again = Counted(alone(tmp_path / "elsewhere", tmp_path))
    assert same(task, read_task(tokenizer, file, again)) and again.num_finds == 0
    assert same(task, read_task(tokenizer, file))
    assert 0 < task.num_train < 36


def test_other_rows_settings_or_tokens_are_looked_at_again(tokenizer, tmp_path, file, first):
    other_tokens = load_tokenizer(tiny_directory())
    other_tokens.chat_template = "{{ messages[0].content }}"
    assert tokenizer_digest(other_tokens) != tokenizer_digest(tokenizer)
    for changes in (
        {"chat": False},
        {"answer_key": None},
        {"prompt_key": "answer"},
        {"max_prompt_tokens": 8},
        {"num_eval": 3},
        {"tokenizer": other_tokens},
        {},
    ):
        if not changes:
            write_prompts(file, *PROMPTS[1:], "7")
        reading = Counted(alone(tmp_path))
        read_task(**{"tokenizer": tokenizer, "path": file, "reading": reading, **changes})
        assert reading.num_finds == 1


def test_the_same_file_of_another_kind_is_looked_at_again(tokenizer, tmp_path):
    """GSM8K's prompts have an instruction behind them."""
    rows = [{"question": f"{n}+1", "answer": f"so #### {n + 1}"} for n in range(40)]
    file = write(tmp_path / "rows.jsonl", *rows)
    reading, again = alone(tmp_path), Counted(alone(tmp_path))
    read_task(tokenizer, file, reading, prompt_key="question", max_prompt_tokens=200)
    reading.save(tmp_path)
    given = {"max_prompt_tokens": 200, "num_eval": 4}
    build_task("gsm8k", tokenizer, path=file, remembered=again, **given)
    assert again.num_finds == 1


def test_a_tokenizer_is_known_by_its_tokens_its_template_and_its_special_tokens():
    def digest(change=lambda loaded: None):
        loaded = load_tokenizer(tiny_directory())
        change(loaded)
        return tokenizer_digest(loaded)

    digests = {
        digest(),
        digest(lambda loaded: loaded.add_tokens(["12"])),
        digest(lambda loaded: setattr(loaded, "chat_template", "{{ bos_token }}")),
        digest(lambda loaded: setattr(loaded, "bos_token", loaded.eos_token)),
    }
    assert len(digests) == 4 and digest() in digests
    assert tokenizer_digest(object()) is None


def test_what_was_kept_stays_kept_beside_what_is_new(tokenizer, tmp_path, file, first, caplog):
    """As of a mixture to which a part was added."""
    files = [file, write_prompts(tmp_path / "b.jsonl", *PROMPTS[1:])]
    second = alone(tmp_path)
    for own in files:
        read_task(tokenizer, own, second)
    second.save(tmp_path)
    third = Counted(alone(tmp_path))
    for own in files:
        read_task(tokenizer, own, third)
    assert third.num_finds == 0
    third._reading.save(tmp_path / "gone")  # there is nothing to save
    assert "cannot be written" not in caplog.text
    first[0].save(tmp_path / "gone")
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("damage", ["bit", "no text"])
def test_a_damaged_file_is_made_anew_and_said(tokenizer, tmp_path, file, first, caplog, damage):
    _, task = first
    kept = tmp_path / FILE
    whole = kept.read_text()
    damaged = whole.replace(task.train_digest, task.eval_digest)
    kept.write_text(damaged if damage == "bit" else '{"found": 3, "digest": "0"}')
    reading = Counted(alone(tmp_path))
    assert same(task, read_task(tokenizer, file, reading)) and reading.num_finds == 1
    assert f"{kept} is damaged" in caplog.text
    reading._reading.save(tmp_path)
    assert kept.read_text() == whole


def together(files, tokenizer):
    """What ranks that read these files at the same time have: a task or an error of each, and how
    often it has looked.
    """
    store, size = dist.HashStore(), len(files)
    readings = [Counted(SharedReading(Rank(rank, size, store), (), WAIT_S)) for rank in range(size)]

    def work(rank):
        try:
            return read_task(tokenizer, files[rank], readings[rank])
        except ValueError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(work, range(size), timeout=WAIT_S))
    return made, [reading.num_finds for reading in readings]


def test_one_rank_looks_for_all(tokenizer, file):
    tasks, finds = together([file] * 3, tokenizer)
    assert finds == [1, 0, 0]
    assert all(same(task, read_task(tokenizer, file)) for task in tasks)


def test_a_rank_with_other_rows_finds_its_own_and_so_is_found_out(tokenizer, tmp_path, file):
    tasks, finds = together(
        [file, write_prompts(tmp_path / "b.jsonl", *PROMPTS[1:], "7")], tokenizer
    )
    assert finds == [1, 1] and tasks[0].train_digest != tasks[1].train_digest


def test_what_is_wrong_with_the_rows_ends_all_ranks(tokenizer, file):
    file.write_text(file.read_text() + "{")
    (told, other), finds = together([file, file], tokenizer)
    assert finds == [1, 0]
    assert f"{file}:41: not JSON" in str(told) and "rank 0 failed to read" in str(other)


@settings(max_examples=50)
@given(
    lines=st.lists(
        st.sampled_from(["", " ", "\u00a0", '{"prompt": "1"}', ' {"prompt": "\u00e9"}', "\r"])
    ),
    mark=st.booleans(),
    end=st.sampled_from(["", "\n"]),
)
def test_rows_that_are_read_when_asked_for_are_those_of_the_file(
    tmp_path_factory, lines, mark, end
):
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_bytes(("\ufeff" * mark + "\n".join(lines) + end).encode())
    want = [(n, json.loads(line)) for n, line in enumerate(lines, 1) if line.strip()]
    if not want:
        with pytest.raises(ValueError, match="empty"):
            JsonlExamples(file, dict)
        return
    rows = JsonlExamples(file, lambda row: row_to_example(row, "prompt", None))
    rows.check()
    assert [rows[i].text for i in range(len(rows))] == [row["prompt"] for _, row in want]
    assert [rows.where(i) for i in range(len(rows))] == [f"{file}:{n}" for n, _ in want]
    odd = rows.select(range(0, len(rows), 2))
    assert [example.text for example in odd] == [row["prompt"] for _, row in want[::2]]
