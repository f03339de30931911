"""The reference of all keys, docs/keys.md, which `python -m llamarl.config` makes; words that keys
may have; and which keys make a run that run.
"""

from typing import get_args

import pytest

from llamarl.config.__main__ import page
from llamarl.config.command_line import RL
from llamarl.config.conversion import is_marked, known_keys
from llamarl.config.evaluation import EVALUATION
from llamarl.config.keys import sentence_of
from llamarl.config.preferences import PREFERENCES
from llamarl.config.supervised import REWARD_MODEL, SFT
from llamarl.launch.identity import THE_DATA, Difference, Identity, differences
from llamarl.learning.advantages import ADVANTAGES
from llamarl.learning.optim import SCHEDULES
from llamarl.models.quantize import QUANTIZED
from llamarl.observe.compare import TELLING
from llamarl.tickets.governors import GOVERNORS
from llamarl.words import choices
from llamarl.words.fields import all_keys, schemas_of
from llamarl.words.texts import first_of
from tests.launching import ROOT


def test_every_key_has_a_sentence_under_its_field():
    silent = set()
    for kind in (RL, EVALUATION, SFT, REWARD_MODEL, PREFERENCES):
        for name, key in all_keys(kind.schema).items():
            is_value = not schemas_of(key.hint) and not name.endswith("kind")
            if is_value and not sentence_of(key.schema, name.rpartition(".")[2]):
                silent.add(name)
    assert not silent


def test_the_page_of_keys_is_what_the_fields_say():
    assert (ROOT / "docs/keys.md").read_text() == page()


def test_words_that_name_functions_and_classes_have_one_each():
    for names, made in (
        (choices.Schedule, SCHEDULES),
        (choices.Governor, GOVERNORS),
        # gae needs a value head, turns the rewards of turns.
        (choices.Advantages, {*ADVANTAGES, "gae", "turns"}),
        (choices.Quantized, {*QUANTIZED, "none"}),
    ):
        assert set(get_args(names)) == set(made)
    assert set(TELLING) <= set(known_keys()), "keys that name a variant"


def test_a_long_list_ends_with_the_count_of_the_rest():
    assert first_of(["a", "b"], 2) == ["a", "b"]
    assert first_of(["a", "b", "c", "d"], 2) == ["a", "b", "and 2 more"]


# --- The keys that make a run that run, and what is told of others at a resume ---


def marked(mark):
    return {key for key in known_keys() if is_marked(key, mark)}


def test_the_keys_of_a_runs_identity_and_those_that_decide_what_its_prompts_are():
    assert marked("identity") == {
        *("seed", "groups_per_step", "group_size", "max_new_tokens", "temperature", "max_lag"),
        *("buffer.kind", "generator.temperature", "buffer.draw"),
    }
    of_the_task = {key for key in known_keys() if key.split(".")[0] == "task"}
    of_the_data = {"seed", "model.path", "model.template_options", *of_the_task}
    of_the_data |= {"eval.num_prompts", "eval.sets"}
    assert marked("data") == of_the_data


@pytest.mark.parametrize(
    "mark, sections, has, lacks",
    [
        (  # the keys that make no other variant
            "outward",
            "seed run_dir resume resume_with_other dry_run ranks device threads timeout_s "
            "heartbeat_timeout_s straggler_factor checkpoint metrics eval",
            "eval.target",
            "eval.every",
        ),
        (  # the keys of how a run answers
            "answers",
            "task reward eval generator model group_size max_new_tokens temperature seed threads "
            "max_lag buffer victim",
            "model.dtype",
            "model.path",
        ),
    ],
)
def test_the_sections_of_a_mark(mark, sections, has, lacks):
    assert {key.partition(".")[0] for key in marked(mark)} == set(sections.split())
    assert is_marked(has, mark) and not is_marked(lacks, mark)


def identity(prompts="a", reward="r", models=None, kept=(), adapters=None, **config):
    return Identity(
        config=config,
        prompts={"training prompts": prompts},
        reward=reward,
        models=models or {},
        kept=list(kept),
        adapters=adapters or {"rank": 0},
    )


@pytest.mark.parametrize(
    "new, what, permit",
    [
        (identity(seed=2), "seed: null in the checkpoint, 2 now", None),
        (identity(prompts="b"), f"other training prompts: {THE_DATA}", "data"),
        (
            identity(prompts="b", task={"chat": True}),
            "other training prompts: task.chat: null in the checkpoint, true now",
            "data",
        ),
        (identity(reward="s"), "another reward: r in the checkpoint, s now", "reward"),
    ],
)
def test_a_difference_is_told_with_the_word_that_lets_it_pass(new, what, permit):
    assert differences(identity(), new) == [Difference(what, permit)]


def lora(rank, targets):
    return {"rank": rank, "alpha": 8.0, "targets": targets}


@pytest.mark.parametrize(
    "old, new, told",
    [
        (lora(4, ["q_proj"]), lora(4, ["q_proj"]), {}),
        (lora(4, ["q_proj"]), {"rank": 0}, {"rank": "4 in the checkpoint, 0 now"}),
        ({"rank": 0}, lora(4, ["q_proj"]), {"rank": "0 in the checkpoint, 4 now"}),
        (
            lora(4, ["q_proj"]),
            lora(8, ["q_proj", "v_proj"]),
            {
                "rank": "4 in the checkpoint, 8 now",
                "targets": "[q_proj] in the checkpoint, [q_proj,v_proj] now",
            },
        ),
    ],
)
def test_other_adapters_are_another_run(old, new, told):
    found = differences(identity(adapters=old), identity(adapters=new))
    lines = [f"trainer.lora.{key}: {what}" for key, what in told.items()]
    assert found == [Difference(line, None) for line in lines]


def policy(path, kept=(), **parts):
    return identity(models={"model.path": parts}, kept=kept, model={"path": path})


def test_a_model_that_differs_is_named_with_what_differs_of_it():
    old = policy("a", **{"weights": "1", "config.json": {"rope_theta": 1.0, "labels": []}})
    moved = policy("b", **{"weights": "1", "config.json": {"rope_theta": 1.0, "labels": []}})
    assert differences(old, moved) == []
    assert differences(identity(), identity(lr=1)) == [], "nor is another rate another run"
    other = policy("b", **{"weights": "2", "config.json": {"rope_theta": 2.0, "labels": []}})
    (found,) = differences(old, other)
    assert found.permit == "model"
    assert found.what == (
        "another model, model.path=b (a in the checkpoint): other weights; "
        "config.json: rope_theta: 1.0 in the checkpoint, 2.0 now"
    )


def test_what_only_one_of_two_runs_reads_of_a_model_is_no_difference():
    both = {"tokenizer": "t", "stop tokens": [2]}
    assert differences(policy("a", **both), policy("a", **both, weights="1")) == []
    assert differences(policy("a", **both, weights="1"), policy("a", **both)) == []
    assert differences(identity(), identity(models={"eval.gold": {"weights": "1"}})) == []


def test_other_weights_of_a_model_that_the_checkpoint_has_are_only_told():
    old = policy("a", weights="1", tokenizer="t")
    (told,) = differences(old, policy("a", kept=["model.path"], weights="2", tokenizer="t"))
    assert not told.refuses and "other weights, which are not read" in told.what
    found = differences(old, policy("a", kept=["model.path"], weights="2", tokenizer="u"))
    assert [(d.refuses, d.permit) for d in found] == [(False, None), (True, "model")]
    assert found[1].what == "another model, model.path=a: other tokenizer"


def test_other_stop_tokens_are_told_and_named():
    (found,) = differences(policy("a", **{"stop tokens": [2]}), policy("a", **{"stop tokens": []}))
    assert "another model, model.path=a: stop tokens: [2] in the checkpoint, [] now" == found.what


def test_other_options_of_the_chat_template_are_another_policys():
    old, new = policy("a", template_options={}), policy("a", template_options={"thinks": False})
    (found,) = differences(old, new)
    assert found.refuses and found.permit == "model"
    assert "template_options: thinks: null in the checkpoint, false now" in found.what


def test_a_value_that_changes_what_is_learned_is_told_and_one_that_does_not_is_not():
    old, new = identity(lr=1e-6, timeout_s=600.0), identity(lr=1e-5, timeout_s=60.0)
    (told,) = differences(old, new)
    assert told == Difference("lr: 1e-06 in the checkpoint, 1e-05 now", None, refuses=False)
    assert differences(identity(), identity(lr=1e-5)) == []  # of another kind of its section
