"""Which keys of a config make a run that run, and which are told where its prompts differ."""

import pytest

from llamarl.config.conversion import is_marked, known_keys
from llamarl.launch.identity import THE_DATA, Difference, Identity, differences


def marked(mark):
    return {key for key in known_keys() if is_marked(key, mark)}


def test_the_keys_of_a_runs_identity():
    assert marked("identity") == {
        *("seed", "groups_per_step", "group_size", "max_new_tokens", "temperature", "max_lag"),
        *("buffer.kind", "model.path", "generator.temperature", "buffer.draw"),
    }


def test_the_keys_that_decide_what_the_prompts_are():
    keys = marked("data")
    of_the_task = {key for key in known_keys() if key.split(".")[0] == "task"}
    assert keys == {"seed", "model.path", "eval.num_prompts", *of_the_task}


def test_the_keys_that_make_no_other_variant():
    keys = {key.partition(".")[0] for key in marked("outward")}
    assert keys == set(
        "seed run_dir resume resume_with_other dry_run threads timeout_s heartbeat_timeout_s "
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


def identity(prompts="a", reward="r", **config):
    return Identity(config=config, prompts={"training prompts": prompts}, reward=reward)


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
