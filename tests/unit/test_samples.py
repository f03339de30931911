"""Samples: what of a step is kept for people, once, and that no step depends on it."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load, save

from llamarl.comm import wire
from llamarl.learning.replay import _joined, _Row
from llamarl.learning.samples import (
    MOST_TOKENS,
    SampleMaker,
    SeenGroup,
    StepWatch,
    TokenTexts,
    best_and_worst,
)
from llamarl.learning.targets import Targets
from llamarl.observe.rows import RowWriter
from llamarl.observe.samples import FILE_NAME, SampleFile, read_samples, sample_lines
from llamarl.types import Group, Outcome
from llamarl.words.choices import GROUP_FIELDS
from tests.build.completion import build_completion
from tests.build.group import build_group
from tests.updating import VERSION, go_on, groups_of, logprobs_alone, update_of

NAN = math.nan


def decode(ids):
    """Tokens that are bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def group_of(ticket, rewards, *, tokens=3, mask=None, versions=5):
    """A group of completions of "abc...", all alike but for their rewards."""
    size = len(rewards)
    one = torch.arange(97, 97 + tokens) if tokens <= 26 else torch.full((tokens,), 97)
    masks = torch.tensor((mask or [True] * tokens) * size)
    return build_group(
        ticket,
        [tokens] * size,
        rewards,
        prompt=list(b"say it"),
        version=versions,
        token_ids=one.repeat(size),
        generator_logprobs=torch.full((size * tokens,), -0.5).masked_fill(~masks, 0.0),
        loss_mask=masks,
    )


def seen_of(group, advantages=None):
    if advantages is None:
        advantages = torch.nan_to_num(group.rewards - group.rewards.nanmean())
    return SeenGroup(
        group=group,
        targets=Targets.of(group, torch.as_tensor(advantages)),
        trainer_logprobs=torch.full((group.token_ids.numel(),), -0.25),
    )


def maker(num_groups=2, **more):
    return SampleMaker(num_groups=num_groups, decode=decode, **more)


# --- What is made of a step ---


def test_the_texts_of_tokens_are_the_text_of_all_also_where_a_character_has_several():
    ids = list("a é😀\n".encode())
    texts = TokenTexts(decode).of(ids)
    assert texts == ["a", " ", "", "é", "", "", "", "😀", "\n"]
    assert TokenTexts(decode).of([97, 0xF0]) == ["a", "\ufffd"]  # it ends within a character
    # A space that a decoder drops at the beginning is kept within.
    words = {1: " the", 2: " end"}
    texts = TokenTexts(lambda ids: "".join(words[i] for i in ids).removeprefix(" "))
    assert texts.of([1, 2, 1]) == [" the", " end", " the"]


def test_every_fact_of_a_completion_is_in_the_sample():
    group = dataclasses.replace(
        group_of(7, [1.0, NAN], mask=[True, False, True]),
        turn_rewards=torch.tensor([0.5, 0, 0, 0, 0, 0]),
        columns=({"reward/exact/mean": 1.0, "reward/format/mean": 0.25}, {}),
    )
    sample = maker(parts=("exact", "format")).sample([seen_of(group, [0.75, 0.0])], 9)
    assert json.loads(json.dumps(sample, allow_nan=False)) == sample
    (one,) = sample["shown"]
    assert (sample["step"], one["ticket"], one["prompt"], one["taught"]) == (9, 7, "say it", True)
    first, second = one["completions"]
    assert first == {
        "reward": 1.0,
        "shaped": 1.0,
        "parts": {"exact": 1.0, "format": 0.25},
        "finish": "stop",
        "outcome": "score",
        "trained": True,
        "length": 3,
        "left_out": 0,
        "ids": [97, 98, 99],
        "text": ["a", "b", "c"],
        "generator": [-0.5, None, -0.5],  # context has no logprob
        "trainer": [-0.25, -0.25, -0.25],
        "lag": [[3, 3]],  # step 9 began with version 8
        "sampled": [[True, 1], [False, 1], [True, 1]],
        "advantage": [[0.75, 3]],
        "turn_reward": [[0.5, 1], [0.0, 2]],
    }
    assert (second["reward"], second["outcome"], second["trained"]) == (None, "error", False)
    assert second["parts"] == {}
    (line,) = sample["groups"]
    assert dict(zip(GROUP_FIELDS, line, strict=True)) == {
        "ticket": 7,
        "least": 1.0,
        "mean": 1.0,
        "most": 1.0,
        "trained": 1,
        "lag": 3,
        "taught": True,
    }


def test_by_turns_the_widest_group_and_the_first_are_shown_whole():
    rewards = {4: [0.0, 0.0], 2: [1.0, 1.0], 9: [0.0, 1.0], 3: [0.0, 0.5]}
    seen = [seen_of(group_of(ticket, r)) for ticket, r in rewards.items()]
    shown = [one["ticket"] for one in maker(3).sample(seen, 6)["shown"]]
    assert shown == [9, 2, 3]
    lines = maker(0).sample(seen, 6)
    taught = GROUP_FIELDS.index("taught")
    found = {line[0]: line[taught] for line in lines["groups"]}
    assert list(found.items()) == [(2, False), (3, True), (4, False), (9, True)]
    assert lines["shown"] == []


def test_a_group_that_was_left_out_of_the_update_taught_nothing():
    group = group_of(1, [0.0, 1.0])
    nothing = torch.full((6,), NAN)
    left_out = SeenGroup(group=group, targets=None, trainer_logprobs=nothing)
    (one,) = maker().sample([left_out], 6)["shown"]
    assert not one["taught"] and not one["completions"][0]["trained"]
    assert one["completions"][0]["trainer"] == [None] * 3


def test_of_a_long_group_the_best_and_the_worst_are_kept_and_cut():
    group = group_of(1, [0.5, 1.0, 0.0], tokens=MOST_TOKENS)
    (one,) = maker().sample([seen_of(group)], 6)["shown"]
    kept = [(len(c["ids"]), c["left_out"]) for c in one["completions"]]
    half = MOST_TOKENS // 2
    assert kept == [(0, MOST_TOKENS), (half, half), (half, half)]


def test_best_and_worst_are_the_first_among_equals_and_no_number_is_neither():
    assert best_and_worst([9.0, 0.0, 2.0, 0.0, 2.0], [False] + [True] * 4) == (2, 1)
    assert best_and_worst([9.0], [False]) == ()


# --- What the trainer tells ---


@pytest.mark.parametrize("microbatch_tokens, minibatches", [(10, 2), (1000, 1)])
@pytest.mark.filterwarnings("ignore:sequences longer")
def test_the_watched_logprobs_are_those_of_the_weights_before_the_step(
    microbatch_tokens, minibatches
):
    update = update_of(
        microbatch_tokens=microbatch_tokens,
        skip_zero_advantage=False,
        minibatches_per_step=minibatches,
        updates_per_batch=2,
    )
    update.watch = StepWatch()
    groups = groups_of()
    update.run(groups, VERSION, go_on)
    seen = update.watch.take()
    assert [one.group.ticket for one in seen] == [group.ticket for group in groups]
    if minibatches == 2:  # the second minibatch is under weights that have moved
        seen = seen[: len(groups) // 2]
    still = update_of()
    for one in seen:
        known = ~one.trainer_logprobs.isnan()
        assert torch.equal(known, one.group.trained_tokens)
        for place, completion in enumerate(one.group.token_ids.split(one.group.lengths.tolist())):
            if not one.group.trained[place]:
                continue
            want = logprobs_alone(still.decoder, one.group.prompt_ids, completion).detach()
            got = one.trainer_logprobs.split(one.group.lengths.tolist())[place]
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert update.watch.take() == []  # it holds on to nothing


@pytest.mark.bitwise("a step follows from weights and groups alone, watched or not")
def test_a_watched_step_has_the_same_bits():
    plain = update_of()
    watched = update_of()
    watched.watch = StepWatch()
    a = plain.run(groups_of(), VERSION, go_on)
    b = watched.run(groups_of(), VERSION, go_on)
    assert a == b
    for p, q in zip(plain.decoder.parameters(), watched.decoder.parameters(), strict=True):
        assert torch.equal(p, q)


# --- Rewards by part ---


def scored(sample, columns):
    return build_completion(3, sample), Outcome("score", 1.0, "", columns=columns)


def test_columns_are_in_the_group_on_the_wire_and_after_a_draw():
    columns = {"reward/right/mean": 0.1, "dialogues/turns": 3}
    group = Group.of([scored(1, {}), scored(0, columns)])
    assert group.columns == (columns, {})
    (come,) = wire.decode(wire.encode([group]))
    assert come.columns == group.columns
    (sent,) = wire.decode(wire.encode([build_completion(columns=columns)]))
    assert sent.columns == columns
    row = {"group": group, "joined": 0, "oldest": 0, "reward": 1.0, "prompt": b""}
    rows = [_Row(place=n, span=slice(2 * n, 2 * n + 2), completion=b"", **row) for n in (1, 0)]
    assert _joined(rows).columns == ({}, columns)


def test_a_group_of_a_checkpoint_without_columns_has_none():
    group = Group.of([scored(0, {"dialogues/turns": 3}), scored(1, {})])
    message = wire.encode([group])
    size = int.from_bytes(message[:8], "little")
    tensors = load(message)
    header = json.loads(json.loads(message[8 : 8 + size])["__metadata__"]["records"])
    del header["values"]["columns"]
    (old,) = wire.decode(save(tensors, metadata={"records": json.dumps(header)}))
    assert old.columns == ({}, {})
    with pytest.raises(ValueError, match="Group 3: 2 lengths, .* columns of 1"):
        dataclasses.replace(group, columns=({},))


# --- The file ---


def keep(file, *steps, size=10):
    for step in steps:
        file.keep(step, lambda: {"groups": [], "shown": [], "text": "x" * size})


def steps_of(path):
    return [sample["step"] for sample in read_samples(path / FILE_NAME)]


def test_a_resumed_run_repeats_no_sample_and_keeps_no_torn_line(tmp_path):
    keep(SampleFile(tmp_path), 1, 2, 3, 4)
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write('{"step": 5, "ev')
    resumed = SampleFile(tmp_path)
    resumed.cut(2)
    assert steps_of(tmp_path) == [1, 2]
    keep(resumed, 3, 4)
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_rows_take_the_samples_with_them(tmp_path):
    def writer():
        return RowWriter(tmp_path, [], eval_due=lambda step: False, first_step=0)

    first = writer()
    for step in (1, 2, 3):
        first.keep_sample(step, lambda: {"groups": [], "shown": []})
        first.ingest(step, {"loss/value": 0.0})
        first.flush()
        if step == 2:
            state = first.state_dict(2)
    writer().load_state_dict(state)
    assert steps_of(tmp_path) == [1, 2]
    writer().ingest(0, {"loss/value": 0})
    fresh = writer()
    fresh.ingest(0, {"loss/value": 0.0})
    fresh.flush()  # a run that keeps no samples leaves none of an earlier run under its name
    assert not (tmp_path / FILE_NAME).exists()


def test_the_file_has_a_bound_and_covers_the_whole_run(tmp_path):
    file = SampleFile(tmp_path, most_bytes=1000)
    for step in range(1, 101):
        keep(file, step, size=100)
        assert (tmp_path / FILE_NAME).stat().st_size <= 1000
    samples = read_samples(tmp_path / FILE_NAME)
    (every,) = {sample["every"] for sample in samples}
    steps = [sample["step"] for sample in samples]
    assert every > 1 and steps == list(range(every, steps[-1] + 1, every))
    assert steps[-1] > 100 - every
    resumed = SampleFile(tmp_path, most_bytes=1000)
    resumed.cut(100)
    assert not resumed.wants(100 + 1) or every == 1
    assert resumed.wants(every * 1000)


def test_a_damaged_file_is_cut_and_named(tmp_path, caplog):
    keep(SampleFile(tmp_path), 1, 2)
    text = (tmp_path / FILE_NAME).read_text()
    (tmp_path / FILE_NAME).write_text(text.replace('{"step":2', "{step 2"))
    with pytest.raises(ValueError, match=f"{FILE_NAME}:2: not a sample"):
        read_samples(tmp_path / FILE_NAME)
    SampleFile(tmp_path).cut(7)
    assert steps_of(tmp_path) == [1] and "are cut off" in caplog.text


def test_a_disk_that_refuses_costs_samples_and_no_run(tmp_path, caplog):
    file = SampleFile(tmp_path)
    keep(file, 1)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    keep(file, 2, 3)
    file.sync()
    assert caplog.text.count("samples are left out") == 1


# --- The console ---


def test_a_shown_sample_has_best_and_worst_quoted():
    group = group_of(7, [0.0, 1.0])
    sample = maker().sample([seen_of(group)], 25)
    sample["shown"][0]["completions"][0]["text"] = ["\x1b[31m", "red"]
    assert sample_lines(sample) == [
        "  sample of step 25: 'say it'",
        "    best  1  'abc'",
        "    worst 0  '\\x1b[31mred'",
    ]
    equal = maker().sample([seen_of(group_of(7, [1.0, 1.0]))], 25)
    assert "nothing is learned" in sample_lines(equal)[-1]
    none = maker().sample([seen_of(group_of(7, [NAN, NAN]), [0.0, 0.0])], 25)
    assert "no completion has a reward" in sample_lines(none)[-1]
