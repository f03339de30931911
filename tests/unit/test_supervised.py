"""Supervised training: reward models' loss, packing, calibration and data, a step that is not
finite, and rows of JSON lines as pairs with transformers' own mask.
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.random_weights import random_weights
from llamarl.config.command_line import compose_config
from llamarl.config.supervised import SFT
from llamarl.errors import NotFinite
from llamarl.launch.supervised import launch_supervised, within_context
from llamarl.learning import sft
from llamarl.learning.preference import (
    BINS,
    BradleyTerry,
    Preference,
    bradley_terry,
    held_out_columns,
    held_out_sums,
    pack_preferences,
    pair_scores,
    read_preference_data,
)
from llamarl.learning.sft import conversation_pair, read_pairs, read_sft_data
from llamarl.learning.supervised import ExampleOrder, SupervisedSettings, SupervisedUpdate
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder
from llamarl.models.config import as_scorer, read_config, tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.models.scorer import scores_at
from tests.build.model_directory import copy_tiny
from tests.supervised import task_of, update_that_keeps_weights
from tests.tolerances import rounding

CPU = torch.device("cpu")
CONFIG = as_scorer(read_config(tiny_directory()))
SCORES = rounding(terms=CONFIG.hidden_size, depth=2 * CONFIG.num_hidden_layers)


def scorer():
    decoder = random_weights(build_decoder(CONFIG), seed=3)
    for parameter in decoder.parameters():
        parameter.data *= 1 + 4 * (parameter.dim() > 1)
    return decoder


def pairs_of(*sizes: tuple[int, int, int]) -> list[Preference]:
    """Of random tokens: how many of the prompt and of either answer."""
    draw = torch.Generator().manual_seed(5)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(0, CONFIG.vocab_size, (count,), generator=draw)

    return [Preference(ids(p), ids(c), ids(r), margin=0.5) for p, c, r in sizes]


# --- The loss ---


def test_the_loss_by_hand():
    chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    margins = torch.tensor([0.0, 1.0])
    # Differences less margins: 1 and -3.
    expected = math.log(1 + math.exp(-1)) + math.log(1 + math.exp(3))
    loss = bradley_terry(chosen, rejected, margins, center_coef=0.0)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    # Sums of scores: 1 and 2.
    centred = bradley_terry(chosen, rejected, margins, center_coef=0.1)
    assert centred.item() == pytest.approx(expected + 0.1 * (1 + 4), rel=1e-6)


def test_a_far_wrong_pair_has_a_finite_loss():
    loss = bradley_terry(torch.tensor([-1e4]), torch.tensor([1e4]), torch.zeros(1), center_coef=0.0)
    assert loss.item() == 2e4


# --- Packing ---


def test_a_prompt_is_packed_once_for_both_answers():
    pair = Preference(torch.tensor([7, 8]), torch.tensor([1, 2]), torch.tensor([3]), margin=2.0)
    batch = pack_preferences([pair, pair], CPU)
    assert batch.input_ids.tolist() == [7, 8, 1, 2, 3] * 2
    assert batch.positions.tolist() == [0, 1, 2, 3, 2] * 2
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 7, 9, 10]
    assert batch.parents.tolist() == [-1, 0, 0, -1, 3, 3]
    assert (batch.chosen.tolist(), batch.rejected.tolist()) == ([3, 8], [4, 9])
    assert batch.margins.tolist() == [2.0, 2.0]


@pytest.mark.machine
def test_packed_scores_are_those_of_separate_sequences(float32_products):
    decoder = scorer()
    pairs = pairs_of((5, 3, 9), (1, 1, 1), (12, 2, 30))
    batch = pack_preferences(pairs, CPU)
    attention = PackedAttention(batch.cu_seqlens, batch.parents)

    def alone(pair: Preference, answer: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([pair.prompt_ids, answer])
        whole = torch.tensor([0, tokens.numel()])
        last = torch.tensor([tokens.numel() - 1])
        places = torch.arange(tokens.numel())
        return decoder(tokens, places, PackedAttention(whole), scores_at(last))[0, 0]

    with torch.no_grad():
        chosen, rejected = pair_scores(decoder, batch, attention)
        for i, pair in enumerate(pairs):
            for ours, answer in ((chosen, pair.chosen_ids), (rejected, pair.rejected_ids)):
                theirs = alone(pair, answer)
                assert float(ours[i] - theirs) == pytest.approx(0, abs=SCORES * float(chosen.std()))
    assert chosen.std() > 0.01  # the scores do differ


def gradients(budget: int) -> dict[str, torch.Tensor]:
    """Of one step on the same pairs in microbatches of so many tokens, without its update."""
    decoder = scorer()
    update = update_that_keeps_weights(decoder, BradleyTerry(center_coef=0.01), budget)
    row = update.run(pairs_of((5, 3, 9), (2, 4, 4), (12, 2, 10), (3, 1, 2)), 0)
    assert row["loss/value"] > 0
    return {name: p.grad for name, p in decoder.named_parameters()}


@pytest.mark.machine
def test_gradients_do_not_depend_on_what_is_packed_with_what(float32_products):
    whole = gradients(budget=1000)
    for name, gradient in gradients(budget=1).items():
        scale = float(whole[name].abs().max())
        torch.testing.assert_close(gradient, whole[name], rtol=0, atol=2 * SCORES * scale)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3


# --- Held-out pairs ---


def test_calibration_by_an_independent_way():
    draw = np.random.default_rng(0)
    chosen, rejected = draw.normal(size=(2, 500)) * 2
    sums = held_out_sums(torch.tensor(chosen), torch.tensor(rejected), torch.zeros(500))
    columns = held_out_columns({name: float(value) for name, value in sums.items()}, 500)
    probability = 1 / (1 + np.exp(rejected - chosen))
    confidence = np.maximum(probability, 1 - probability)
    is_right = probability > 0.5
    edges = np.linspace(0.5, 1, 11)
    which = np.digitize(confidence, edges[1:-1])
    error = 0.0
    for i, name in enumerate(BINS):
        of_bin = which == i
        assert columns[f"calibration/pairs/{name}"] == of_bin.sum() > 0
        share = is_right[of_bin].mean()
        assert columns[f"calibration/accuracy/{name}"] == pytest.approx(share)
        error += of_bin.mean() * abs(share - confidence[of_bin].mean())
    assert columns["eval/calibration_error"] == pytest.approx(error)
    assert columns["eval/accuracy"] == pytest.approx(is_right.mean())
    assert columns["eval/margin"] == pytest.approx((chosen - rejected).mean())
    assert columns["eval/loss"] == pytest.approx(-np.log(probability).mean())
    assert columns["eval/score_std"] == pytest.approx(np.concatenate([chosen, rejected]).std())


def test_an_equal_score_is_not_ranked_right():
    sums = held_out_sums(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    columns = held_out_columns({name: float(value) for name, value in sums.items()}, 2)
    assert columns["eval/accuracy"] == 0
    assert columns["eval/calibration_error"] == pytest.approx(0.5)


# --- The order of examples ---


def test_every_epoch_has_every_example_once():
    per_step = 7
    order = ExampleOrder(num_examples=10, examples_per_step=per_step, epochs=2, seed=1)
    seen = []
    for step in range(order.num_steps):
        seen += order.of_step(step)
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:] and len(seen) == 20


def test_a_part_of_an_epoch_and_another_seed():
    half = ExampleOrder(num_examples=10, examples_per_step=4, epochs=0.5, seed=1)
    assert [len(half.of_step(step)) for step in range(half.num_steps)] == [4, 1]
    other = ExampleOrder(num_examples=10, examples_per_step=4, epochs=0.5, seed=2)
    assert other.of_step(0) != half.of_step(0)


# --- Data ---


def rows(path, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


@pytest.fixture
def tokenizer():
    return load_tokenizer(tiny_directory())


@pytest.fixture
def read(tmp_path, tokenizer):
    """read(*rows, **task): the data of these rows, told to the embedded tokenizer."""

    def read_rows(*lines: object, own=tokenizer, **task):
        file = rows(tmp_path / "pairs.jsonl", *lines)
        return read_preference_data(task_of(file, **{"num_eval": 1, **task}), own)

    return read_rows


GOOD = {"prompt": "1+1=", "chosen": "2", "rejected": "33"}


def test_answers_end_with_the_end_token_and_prompts_are_apart(read, tokenizer):
    (pair,) = read(GOOD | {"margin": 0.25}, num_eval=0).train
    assert pair.prompt_ids.tolist() == tokenizer.encode("1+1=")
    of_two = tokenizer("2", add_special_tokens=False)["input_ids"]
    assert pair.chosen_ids.tolist() == [*of_two, tokenizer.eos_token_id]
    assert pair.rejected_ids.numel() == 3 and pair.margin == 0.25


@pytest.mark.parametrize(
    "row, said",
    [
        ({"prompt": "1+1=", "chosen": "2"}, 'no key "rejected"'),
        ({"prompt": "1+1=", "chosen": "2", "rejected": None}, '"rejected" must be text'),
        (GOOD | {"rejected": "2"}, "both completions are equal"),
        (GOOD | {"prompt": " "}, '"prompt" must be text that is not empty'),
        (GOOD | {"prompt": []}, '"prompt" is an empty list'),
        (GOOD | {"margin": float("nan")}, '"margin" must be a finite number'),
        (GOOD | {"margin": True}, '"margin" must be a finite number'),
        (GOOD | {"chosen": "1" * 20}, "task.max_tokens=16"),
        (GOOD | {"chosen": [{"role": "user", "content": "2"}]}, "not assistant"),
        (GOOD | {"chosen": [{"role": "assistant"}]}, "message 1"),
        (GOOD | {"prompt": [{"role": "user", "content": "1"}]}, "no chat template"),
    ],
)
def test_a_bad_row_is_named_by_its_line(read, row, said):
    with pytest.raises(ValueError, match=r"pairs\.jsonl:2: ") as refused:
        read(GOOD, row)
    assert said in str(refused.value)


def test_pairs_that_are_too_long_are_left_out_where_that_is_asked_for(read, caplog):
    data = read(GOOD, GOOD | {"chosen": "1" * 20}, GOOD, drop_long=True)
    assert len(data.train) + len(data.held_out) == 2
    assert "1 of 3 rows have more than task.max_tokens=16 tokens" in caplog.text
    with pytest.raises(ValueError, match="no row fits"):
        read(GOOD | {"chosen": "1" * 20}, drop_long=True)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["?", "<e>", "U", "A", "a", "b", "c"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", unk_token="?")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'U ' if m.role == 'user' else 'A ' }}{{ m.content }} "
        "{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    return tokenizer


ASKED = [{"role": "user", "content": "a"}]
ANSWERED = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "prompt, chosen",
    [
        ("a", "b"),
        ("a", [ANSWERED]),
        ("a", [*ASKED, ANSWERED]),
        (ASKED, "b"),
        (ASKED, [*ASKED, ANSWERED]),
    ],
)
def test_texts_and_messages_are_the_same_tokens(read, prompt, chosen):
    row = {"prompt": prompt, "chosen": chosen, "rejected": "c"}
    (pair,) = read(row, num_eval=0, own=chat_tokenizer()).train
    assert pair.prompt_ids.tolist() == [2, 4, 3]
    assert (pair.chosen_ids.tolist(), pair.rejected_ids.tolist()) == ([5, 1], [6, 1])


def test_messages_that_do_not_repeat_the_prompt_are_refused(read):
    chosen = [{"role": "user", "content": "c"}, ANSWERED]
    with pytest.raises(ValueError, match="do not begin with the prompt's"):
        read({"prompt": "a", "chosen": chosen, "rejected": "c"}, own=chat_tokenizer())


# --- A step that is not finite ---


SETTINGS = SupervisedSettings(
    lr=0.5, schedule="constant", warmup_steps=0, max_steps=2, microbatch_tokens=8, max_grad_norm=1.0
)


def sound(weight):
    return weight.square().sum()


def infinite_gradient(weight):
    """0, whose derivative by the root of 0 is not finite."""
    return (weight - weight.detach()).abs().sqrt().sum()


def infinite_loss(weight):
    """A constant that is no number beside a gradient that is one."""
    return weight.square().sum() + math.inf


class OfOneWeight:
    """An Objective whose examples say what the loss of their microbatch is."""

    def num_tokens(self, example):
        return 8  # a microbatch each

    def num_targets(self, example):
        return 1

    def pack(self, examples, device):
        return examples

    def loss(self, decoder, batch):
        weight = decoder.norm.scale
        return batch[0](weight), {}, SimpleNamespace(padded_tokens=8)


def weights_of(decoder):
    return [parameter.detach().clone() for parameter in decoder.parameters()]


@pytest.mark.parametrize("broken, said", [(infinite_gradient, "nan"), (infinite_loss, "inf")])
def test_what_is_not_finite_changes_nothing_and_the_next_step_is_sound(broken, said):
    decoder = random_weights(build_decoder(read_config(tiny_directory())), seed=3)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.5)
    device = torch.device("cpu")
    update = SupervisedUpdate(
        decoder, optimizer, OfOneWeight(), SETTINGS, group=None, device=device
    )
    before = weights_of(decoder)
    examples = [sound, broken]
    with pytest.raises(NotFinite, match=rf"step 0: loss .*{said}.*; nothing was changed"):
        update.run(examples, 0)
    assert all(map(torch.equal, weights_of(decoder), before))
    assert not optimizer.state, "a moment of what is not finite would spoil all later steps"
    assert all(parameter.grad is None for parameter in decoder.parameters())
    row = update.run([sound, sound], 1)
    assert math.isfinite(row["loss/value"]) and math.isfinite(row["grad_norm"])
    changed = [torch.equal(*pair) for pair in zip(weights_of(decoder), before)]
    assert changed.count(False) == 1


# --- Rows to learn ---


TEMPLATE = (
    "<bos>{% for m in messages %}{{ m['role'] }}: "
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<eos>{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SYSTEM = {"role": "system", "content": "add"}
ONE = {"role": "user", "content": "1+1"}
TWO = {"role": "user", "content": "10+2"}
SAID = [{"role": "assistant", "content": text} for text in ("2", "12", "0")]


@pytest.fixture
def chatting(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize(
    "messages",
    [
        [ONE, SAID[0]],
        [SYSTEM, ONE, SAID[0], TWO, SAID[1]],
        [ONE, SAID[0], TWO],
        [SYSTEM, SAID[2], ONE, TWO, SAID[1]],
    ],
    ids=range(4),
)
def test_what_is_learned_is_what_transformers_marks_as_the_assistants(chatting, messages):
    pair = conversation_pair(messages, chatting)
    want = chatting.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    size = pair.token_ids.numel()
    assert pair.token_ids.tolist() == want["input_ids"][:size]
    assert pair.learned.tolist() == [bool(x) for x in want["assistant_masks"]][:size]
    assert not any(want["assistant_masks"][size:])
    assert pair.learned[-1], "ends with the last learned token"


def test_a_packed_conversation_learns_every_reply_and_nothing_else(chatting):
    pairs = [
        conversation_pair([SYSTEM, ONE, SAID[0], TWO, SAID[1]], chatting),
        sft.SFTPair(torch.tensor([1, 5, 6, 2]), torch.tensor([False, False, True, True])),
    ]
    batch = sft.pack_pairs(pairs)
    assert chatting.decode(batch.labels[batch.rows]) == "2<eos>12<eos>" + chatting.decode([6, 2])
    assert batch.pairs.tolist() == [0] * (2 + 3) + [1] * 2
    before = pairs[0].token_ids[:-1][pairs[0].learned[1:]]
    assert batch.input_ids[batch.rows][:5].tolist() == before.tolist()


def test_a_prompt_and_its_completion_end_with_the_end_token(tokenizer, tmp_path):
    first_row = {"prompt": "1+1=", "completion": "2"}
    file = rows(tmp_path / "a.jsonl", first_row, "", {"prompt": "1+2=", "answer": 3})
    first, second = read_pairs(file, tokenizer, max_tokens=99)
    assert tokenizer.decode(first.token_ids) == "<bos>1+1=2<eos>"
    assert first.learned.tolist() == [False] * 5 + [True] * 2
    assert tokenizer.decode(second.token_ids) == "<bos>1+2=3<eos>"


def test_a_prompt_is_a_user_turn_where_there_is_a_template(chatting, tmp_path):
    row = {"prompt": "1+1", "completion": "2"}
    file = rows(tmp_path / "a.jsonl", row, {"messages": [ONE, SAID[0]]})
    for pair in read_pairs(file, chatting, max_tokens=99):
        assert chatting.decode(pair.token_ids) == "<bos>user: 1+1;assistant: 2<eos>"
    (plain, _) = read_pairs(file, chatting, max_tokens=99, chat=False)
    assert chatting.decode(plain.token_ids) == "<bos>1+12<eos>"


def test_a_prompt_may_be_empty_where_a_text_begins_with_a_token_of_its_own(tokenizer, tmp_path):
    file = rows(tmp_path / "a.jsonl", {"prompt": "", "completion": "2"})
    (pair,) = read_pairs(file, tokenizer, max_tokens=9)
    assert tokenizer.decode(pair.token_ids) == "<bos>2<eos>"
    assert pair.learned.tolist() == [False, True, True]

    class Bare:
        chat_template = None
        eos_token_id = 0

        def encode(self, text):
            return [ord(sign) for sign in text]

    with pytest.raises(ValueError, match='a.jsonl:1: "prompt" is empty, and this tokenizer'):
        read_pairs(file, Bare(), max_tokens=9)


def test_a_number_is_learned_as_it_is_written_in_full(tokenizer, tmp_path):
    numbers = [{"prompt": "1", "completion": one} for one in (42.0, 1e-05, 7)]
    found = read_pairs(rows(tmp_path / "a.jsonl", *numbers), tokenizer, max_tokens=11)
    learned = [tokenizer.decode(pair.token_ids[pair.learned]) for pair in found]
    assert learned == ["42<eos>", "0.00001<eos>", "7<eos>"]


BAD = {
    "not JSON": "{",
    "need a JSON object": [1],
    'no key "completion"; ': {"prompt": "1"},
    '"prompt" must be text, this is list': {"prompt": ["1"], "completion": "1"},
    '"completion" must be text that is not empty': {"prompt": "1", "completion": ""},
    '"completion" must be text, this is NoneType': {"prompt": "1", "completion": None},
    "the answer is bool True; need a text": {"prompt": "1", "completion": True},
    "12 tokens, the model takes 11": {"prompt": "12345", "completion": "12345"},
    '"messages" must be a list': {"messages": "hello"},
    '"messages", message 2: need {"role": ..., "content": text}': {
        "messages": [ONE, {"role": "assistant"}]
    },
    '"messages", message 1: its content is a list of parts': {
        "messages": [{"role": "user", "content": [{"type": "image"}]}, SAID[0]]
    },
    "message 1 has role 'human'; there is system, user": {
        "messages": [{"role": "human", "content": "1"}, SAID[0]]
    },
    "two assistant messages in a row": {"messages": [ONE, SAID[0], SAID[1]]},
    "no assistant message": {"messages": [ONE]},
    "no chat template": {"messages": [ONE, SAID[0]]},
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_named_by_file_and_line(tokenizer, tmp_path, what):
    file = rows(tmp_path / "bad.jsonl", {"prompt": "1", "completion": "2"}, BAD[what])
    with pytest.raises(ValueError) as caught:
        read_pairs(file, tokenizer, max_tokens=11)
    assert f"{file}:2: " in str(caught.value) and what in str(caught.value)


def test_a_template_that_changes_earlier_turns_or_refuses_is_named(chatting, tmp_path):
    file = rows(tmp_path / "bad.jsonl", {"messages": [ONE, SAID[0], TWO, SAID[1]]})
    thinking = "{% if loop.last %}think {% endif %}{{ m['content'] }}<eos>"
    refusing = "{% if messages|length > 1 %}{{ raise_exception('no system') }}{% endif %}"
    for template, said in (
        (TEMPLATE.replace("{{ m['content'] }}<eos>", thinking), "shows message 2 otherwise"),
        (refusing, "refuses it: no system"),
    ):
        chatting.chat_template = template
        with pytest.raises(ValueError, match=f"bad.jsonl:1: the chat template {said}"):
            read_pairs(file, chatting, max_tokens=99)


def test_no_row_of_a_held_out_prompt_is_learned(tokenizer, tmp_path, caplog):
    """20 prompts with three rows each; and as many texts without a prompt, which all differ."""
    lines = [{"prompt": f"{i % 20}=", "completion": str(i)} for i in range(60)]
    data = read_sft_data(task_of(rows(tmp_path / "a.jsonl", *lines), num_eval=500), tokenizer)
    trained = [tuple(pair.token_ids[~pair.learned].tolist()) for pair in data.train]
    held = [tuple(pair.token_ids[~pair.learned].tolist()) for pair in data.held_out]
    assert (len(trained), len(held)) == (54, 2) and not set(trained) & set(held)
    assert "60 rows have 20 different prompts: 2 are held out, and 4 more rows" in caplog.text
    lines = [line | {"prompt": ""} for line in lines]
    data = read_sft_data(task_of(rows(tmp_path / "b.jsonl", *lines), num_eval=500), tokenizer)
    assert (len(data.train), len(data.held_out)) == (54, 6)


# --- How long a row may be: task.max_tokens, and never above the context ---


def config_of(directory, tmp_path, *overrides):
    """Two rows, the second of 45 tokens."""
    texts = ("1+1=", "1+" * 20 + "1=")
    file = rows(tmp_path / "rows.jsonl", *({"prompt": t, "completion": "2"} for t in texts))
    words = [f"model.path={directory}", f"task.path={file}", f"out={tmp_path / 'out'}"]
    return compose_config([*words, *overrides], SFT)


def test_a_context_below_task_max_tokens_is_taken_and_said_once(tmp_path, tokenizer, caplog):
    model = copy_tiny(tmp_path / "model", max_position_embeddings=16)
    config = config_of(tiny_directory(), tmp_path, "task.max_tokens=512")
    assert within_context(config, is_told=True) is config and not caplog.records
    config = config_of(model, tmp_path, "task.max_tokens=1024")
    taken = within_context(config, is_told=True)
    within_context(config, is_told=False)  # another rank
    assert taken.task.max_tokens == 16 and config.task.max_tokens == 1024
    assert len(caplog.records) == 1
    assert f"task.max_tokens=1024, but the context of {model} is 16 tokens" in caplog.text
    given = ("task.drop_long=true", "task.chat=false", "task.num_eval=1")
    short = within_context(config_of(model, tmp_path, *given), is_told=False)
    assert len(read_sft_data(short.task, tokenizer).train) == 1


def test_a_job_refuses_a_row_that_is_longer_than_its_models_context(tmp_path, run_here):
    model = copy_tiny(tmp_path / "model", max_position_embeddings=16)
    config = config_of(model, tmp_path, "task.chat=false", "threads=1")

    def begin():
        with launch_supervised(config, read_sft_data):
            raise AssertionError("the job began")

    code, output = run_here(begin)
    assert code == 2 and f"{tmp_path}/rows.jsonl:2: 45 tokens, the model takes 16" in output.err
