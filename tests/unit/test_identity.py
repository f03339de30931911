"""Which keys of a config make a run that run, and which are told where its prompts differ."""

import pytest

from llamarl.config.conversion import is_marked, known_keys
from llamarl.launch.identity import THE_DATA, Difference, Identity, differences


def marked(mark):
    return {key for key in known_keys() if is_marked(key, mark)}


def test_the_keys_of_a_runs_identity():
    assert marked("identity") == {
        *("seed", "groups_per_step", "group_size", "max_new_tokens", "temperature", "max_lag"),
        *("buffer.kind", "generator.temperature", "buffer.draw"),
    }


def test_the_keys_that_decide_what_the_prompts_are():
    keys = marked("data")
    of_the_task = {key for key in known_keys() if key.split(".")[0] == "task"}
    assert keys == {"seed", "model.path", "eval.num_prompts", "eval.sets", *of_the_task}


def test_the_keys_that_make_no_other_variant():
    keys = {key.partition(".")[0] for key in marked("outward")}
    assert keys == set(
        "seed run_dir resume resume_with_other dry_run ranks threads timeout_s heartbeat_timeout_s "
        "straggler_factor checkpoint metrics eval".split()
    )
    assert is_marked("eval.target", "outward") and not is_marked("eval.every", "outward")


def test_the_keys_of_how_a_run_answers():
    keys = {key.partition(".")[0] for key in marked("answers")}
    assert keys == set(
        "task reward eval generator model group_size max_new_tokens temperature seed threads "
        "max_lag buffer victim".split()
    )
    assert is_marked("model.dtype", "answers") and not is_marked("model.path", "answers")


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
    "new, found",
    [
        (identity(lr=1), []),
        (identity(seed=2), [Difference("seed: null in the checkpoint, 2 now", None)]),
        (identity(prompts="b"), [Difference(f"other training prompts: {THE_DATA}", "data")]),
        (
            identity(prompts="b", task={"chat": True}),
            [
                Difference(
                    "other training prompts: task.chat: null in the checkpoint, true now", "data"
                )
            ],
        ),
        (
            identity(reward="s"),
            [Difference("another reward: r in the checkpoint, s now", "reward")],
        ),
    ],
)
def test_a_difference_is_told_with_the_word_that_lets_it_pass(new, found):
    assert differences(identity(), new) == found


def lora(rank, targets):
    return {"rank": rank, "alpha": 8.0, "targets": targets}


@pytest.mark.parametrize(
    "old, new, told",
    [
        (lora(4, ["q_proj"]), lora(4, ["q_proj"]), []),
        (lora(4, ["q_proj"]), {"rank": 0}, ["trainer.lora.rank: 4 in the checkpoint, 0 now"]),
        ({"rank": 0}, lora(4, ["q_proj"]), ["trainer.lora.rank: 0 in the checkpoint, 4 now"]),
        (
            lora(4, ["q_proj"]),
            lora(8, ["q_proj", "v_proj"]),
            [
                "trainer.lora.rank: 4 in the checkpoint, 8 now",
                "trainer.lora.targets: [q_proj] in the checkpoint, [q_proj,v_proj] now",
            ],
        ),
    ],
)
def test_other_adapters_are_another_run(old, new, told):
    found = differences(identity(adapters=old), identity(adapters=new))
    assert found == [Difference(line, None) for line in told]


def policy(path, kept=(), **parts):
    return identity(models={"model.path": parts}, kept=kept, model={"path": path})


def test_a_model_that_differs_is_named_with_what_differs_of_it():
    old = policy("a", **{"weights": "1", "config.json": {"rope_theta": 1.0, "labels": []}})
    moved = policy("b", **{"weights": "1", "config.json": {"rope_theta": 1.0, "labels": []}})
    assert differences(old, moved) == []
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


def test_a_value_that_changes_what_is_learned_is_told_and_one_that_does_not_is_not():
    old, new = identity(lr=1e-6, timeout_s=600.0), identity(lr=1e-5, timeout_s=60.0)
    (told,) = differences(old, new)
    assert told == Difference("lr: 1e-06 in the checkpoint, 1e-05 now", None, refuses=False)
    assert differences(identity(), identity(lr=1e-5)) == []  # of another kind of its section
