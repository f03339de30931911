"""`task=mixture`: several tasks by weight, each in epochs of its own."""

import json
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config.command_line import ConfigError, compose_config
from llamarl.config.conversion import load_config, save_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tasks.parts import BLOCK, MixtureTask, Schedule, shares
from llamarl.tasks.rewards import part_reward
from llamarl.tickets.prompts import MixedPrompts, PromptStream, part_of, prompts_of
from tests.built_tasks import build_task

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.floats(1.0, 100.0), min_size=1, max_size=5)
TEMPLATE = "{% for m in messages %}{{ m.content }}={% endfor %}"


@settings(deadline=None, max_examples=30)
@given(weights=WEIGHTS, seed=st.integers(0, 99), block=st.integers(0, 3))
def test_every_block_has_as_many_tickets_of_a_part_as_its_weight_says(weights, seed, block):
    schedule = Schedule(weights, seed)
    tickets = range(block * BLOCK, (block + 1) * BLOCK)
    counts = Counter(schedule[ticket].part for ticket in tickets)
    whole = sum(weights.values())
    for name, weight in weights.items():
        assert abs(counts[name] - BLOCK * weight / whole) <= 1


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
    orders = []
    for seed in range(2):
        schedule = Schedule({"a": 1.0, "b": 2.0}, seed)
        for block in range(2):
            tickets = range(block * BLOCK, block * BLOCK + 100)
            orders.append(tuple(schedule[ticket].part for ticket in tickets))
    assert len(set(orders)) == 4


@given(weights=WEIGHTS, count=st.integers(0, 50))
def test_shares_are_whole_and_all_of_it(weights, count):
    found = shares(weights, count)
    assert sum(found.values()) == count
    whole = sum(weights.values())
    assert all(abs(found[name] - count * weights[name] / whole) <= 1 for name in weights)


def test_a_weight_that_no_block_has_a_ticket_for_is_told():
    with pytest.raises(ValueError, match=r"task.parts.b.weight=0.0001: less than one prompt in"):
        Schedule({"a": 1.0, "b": 0.0001}, 0)


def write(file, *prompts):
    rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def part(kind, weight=1.0, **given):
    return {"kind": kind, "weight": weight, "chat": True, "system_prompt": None} | given


@pytest.fixture
def build(tmp_path):
    file = write(tmp_path / "rows.jsonl", *(f"{n}*" for n in range(20)))

    def build(weight=3.0, num_eval=8, **given):
        parts = {
            "sums": part("addition", chat=False, max_prompt_tokens=16),
            "mine": part("jsonl", weight, path=file, max_prompt_tokens=30, **given),
        }
        tokenizer = load_tokenizer(tiny_directory())
        tokenizer.chat_template = TEMPLATE
        return build_task("mixture", tokenizer, parts=parts, num_eval=num_eval)

    return build


def test_each_part_is_walked_in_its_own_epochs(build):
    task = build()
    stream = prompts_of(task, 5)
    assert isinstance(stream, MixedPrompts)
    texts = {"sums": [], "mine": []}
    for ticket in range(200):
        prompt = stream[ticket]
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


def test_a_parts_prompts_have_the_turns_that_it_was_asked_with(build):
    task = build(system_prompt="9")
    by_part = {part_of(task.eval_prompt(j)): task.eval_prompt(j) for j in range(task.num_eval)}
    assert by_part["sums"].messages == ()  # its chat is false
    assert [turn.role for turn in by_part["mine"].messages] == ["system", "user"]
    read = load_tokenizer(tiny_directory()).decode(by_part["mine"].prompt_ids)
    assert read == f"9={by_part['mine'].text}="


def test_what_it_is_known_by_has_parts_weights_and_rows(build, tmp_path):
    known = [prompts_of(build(), 0).fingerprint, prompts_of(build(weight=2.0), 0).fingerprint]
    known += [
        prompts_of(build(), 1).fingerprint,
        prompts_of(build(system_prompt="1"), 0).fingerprint,
    ]
    assert prompts_of(build(), 0).fingerprint == known[0]
    write(tmp_path / "rows.jsonl", *(f"{n}-" for n in range(20)))
    known.append(prompts_of(build(), 0).fingerprint)
    assert len(set(known)) == 5


def test_a_prompts_part_scores_it(build):
    task = build()
    assert task.default_reward == "llamarl.tasks.rewards:exact_match"  # all parts have it
    meta = {"answer": "1.0", "part_reward": "llamarl.tasks.rewards:numeric_match"}
    assert part_reward("", "It is 1.", meta) == 1.0
    meta["part_reward"] = "llamarl.tasks.rewards:exact_match"
    assert part_reward("", "It is 1.", meta) == 0.0


def of_a_group(prompts, completions, metas):
    return [1.0] * len(completions)


def test_parts_with_rewards_of_different_kinds_are_each_scored_by_their_own():
    parts = {
        "sums": part("addition", chat=False, max_prompt_tokens=16),
        "asked": part("questions", chat=False, max_prompt_tokens=64, name="sum", least=1, most=9),
    }
    task = build_task("mixture", load_tokenizer(tiny_directory()), parts=parts, num_eval=8)
    assert task.default_reward == "llamarl.tasks.rewards:part_reward"
    scored = {}
    for j in range(task.num_eval):
        prompt = task.eval_prompt(j)
        said = f"It is {prompt.meta['answer']}."
        scored.setdefault(part_of(prompt), set()).add(part_reward(prompt.text, said, prompt.meta))
    assert scored == {"sums": {0.0}, "asked": {1.0}}  # exact_match, numeric_match
    with pytest.raises(ValueError, match="scores whole groups, which a mixture's parts do not"):
        part_reward("", "", {"part_reward": "tests.unit.test_mixture:of_a_group"})


class OnDemand:
    """A part whose rows are made as they are asked for."""

    name = "on demand"
    default_reward = "llamarl.tasks.rewards:exact_match"
    num_train = num_eval = 3

    def __init__(self, train_digest, eval_digest):
        self.train_digest = train_digest
        self.eval_digest = eval_digest


def test_a_digest_is_of_all_parts_or_there_is_none():
    def digests(*pairs):
        parts = {str(n): OnDemand(*pair) for n, pair in enumerate(pairs)}
        task = MixtureTask(parts, dict.fromkeys(parts, 1.0), 2)
        return task.train_digest, task.eval_digest

    assert digests(("a", ""), ("b", "c"))[1] == ""
    told = {digests(("a", "c"), ("b", "c")), digests(("b", "c"), ("a", "c"))}
    assert len(told) == 2 and "" not in set(chain.from_iterable(told))


def test_parts_have_what_their_kinds_files_say(tmp_path):
    config = compose_config(
        ["task=mixture", "task.parts={a: {kind: addition}, b: {kind: questions, weight: 2}}"]
    )
    a, b = config.task.parts["a"], config.task.parts["b"]
    assert (a.weight, a.prompts.max_prompt_tokens, a.prompts.chat) == (1.0, 16, False)
    assert (b.weight, b.prompts.max_prompt_tokens, b.prompts.name) == (2.0, 64, "sum")
    assert config.longest == 64 + 256
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    "parts, what",
    [
        ("{a: {kind: jsonl}}", "required: set task.parts.a.path"),
        ("{a: {kind: addition, weight: -1}}", "task.parts.a.weight"),
    ],
)
def test_a_wrong_part_is_told_by_its_key(parts, what):
    with pytest.raises(ConfigError) as refused:
        compose_config(["task=mixture", f"task.parts={parts}"])
    assert what in str(refused.value)


def test_a_part_that_cannot_be_read_is_told_by_name(build):
    with pytest.raises(ValueError, match=r"task.parts.mine: (?s:.*)no key"):
        build(prompt_key="question")
    with pytest.raises(ValueError, match="task.parts is empty"):
        build_task("mixture", load_tokenizer(tiny_directory()), parts={})
