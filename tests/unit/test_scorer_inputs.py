"""Models that score and cannot be used: told before anything starts, by key. Command lines that
cannot be are in tests/golden.
"""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from llamarl.config.command_line import compose_config
from llamarl.launch.checks import check_inputs
from llamarl.launch.identity import reward_identity
from llamarl.models.config import tiny_directory
from llamarl.models.directory import model_digest
from tests.build.model_directory import change_json
from tests.random_models import swap_tokens
from tests.scorers import write_scorer
from tests.unit.refusals import job, refusal


@pytest.fixture
def rm(tmp_path):
    """The directory of a random scorer."""
    write_scorer(tmp_path / "rm")
    return tmp_path / "rm"


def scored_by(path):
    return "reward=model", f"reward.path={path}"


LONGROPE = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}
TWO = {"id2label": {"0": "toxic", "1": "fine"}}


def write(name, text):
    return lambda path: (path / name).write_text(text)


@pytest.mark.parametrize(
    "spoil, more, said",
    [
        (lambda path: (path / "tokenizer_config.json").unlink(), (), "no tokenizer_config.json"),
        (write("tokenizer.json", "[]"), (), "tokenizer.json: need a JSON object"),
        (write("tokenizer.json", "{}"), (), "tokenizer.json: transformers makes no tokenizer from"),
        (
            lambda path: change_json(path / "config.json", **LONGROPE),
            (),
            "config.json: rope_scaling type 'longrope' is not supported",
        ),
        (
            lambda path: change_json(path / "config.json", max_position_embeddings=100),
            ("task.max_prompt_tokens=99",),
            "its context is 100 tokens, but task.max_prompt_tokens + max_new_tokens = 105",
        ),
        (swap_tokens, ("reward.stream=true",), "its vocabulary is not the policy's"),
        (
            lambda path: write_scorer(path, labels=("toxic", "fine")),
            (),
            "gives 2 scores; name one of toxic, fine",
        ),
        (
            lambda path: write_scorer(path, labels=("toxic", "fine")),
            ("reward.label=fin",),
            "has no label fin; name one of toxic, fine",
        ),
    ],
)
def test_a_scorer_that_cannot_be_used_is_named_by_its_file_or_key(rm, spoil, more, said):
    check_inputs(job(*scored_by(rm), *(word for word in more if "label" not in word)).inputs)
    spoil(rm)
    assert said in refusal(*scored_by(rm), *more)
    if "rope" in said:
        assert refusal(f"eval.gold={rm}").startswith(f"{rm}/{said}")
    if "label" in said:
        check_inputs(job(*scored_by(rm), "reward.label=fine").inputs)


def test_a_language_model_has_no_head(tmp_path):
    shutil.copytree(tiny_directory(), tmp_path / "lm")
    said = refusal(*scored_by(tmp_path / "lm"))
    assert said.startswith(f"reward.path={tmp_path}/lm: LlamaForCausalLM is a language model")


def test_another_vocabulary_is_noticed(rm, caplog):
    swap_tokens(rm)
    check_inputs(job(*scored_by(rm)).inputs)
    assert "has another vocabulary than the policy: it reads completions anew" in caplog.text
    template = rm / "chat_template.jinja"
    template.write_text("{{ raise_exception('no users here') }}")
    said = refusal(*scored_by(rm), "task.chat=true")
    assert said.startswith(f"{template}: its chat template failed") and "no users here" in said
    check_inputs(job(*scored_by(rm), "task.chat=false").inputs)


def test_parts_take_what_they_do_not_set_from_the_files_of_their_kinds():
    parts = "reward.parts={rm: {kind: model, path: DIR}, brief: {kind: function, weight: 0.2}}"
    parts = parts.replace("DIR", str(tiny_directory()))
    config = compose_config(["reward=parts", parts, "reward.parts.rm.scale=3"])
    parts = config.reward.scorer.parts
    rm, brief = parts["rm"].scorer, parts["brief"].scorer
    assert (parts["rm"].weight, parts["brief"].weight) == (1.0, 0.2)
    assert (rm.scale, rm.dtype, rm.microbatch_tokens) == (3.0, "float32", 8192)
    assert (brief.fn, brief.num_workers) == (None, 1)
    assert config.scorers == {"reward.parts.rm": str(tiny_directory())}


def test_a_scorer_is_known_by_what_it_is(rm, tmp_path):
    write_scorer(tmp_path / "other", seed=1)
    moved = shutil.copytree(rm, tmp_path / "moved")
    known = model_digest(rm)
    assert known == model_digest(moved) != model_digest(tmp_path / "other")
    weights = load_file(moved / "model.safetensors")
    trunk = next(name for name in weights if "mlp" in name)
    save_file(weights | {trunk: weights[trunk] * 1.05}, moved / "model.safetensors")
    assert known != model_digest(moved), "another trunk under the same head"


def test_novelty_is_named_by_what_its_embedder_is_and_not_by_where_it_lies(rm, tmp_path):
    shutil.copytree(tiny_directory(), tmp_path / "same")

    def named(embedder: str) -> str:
        parts = f"reward.parts={{new: {{kind: novelty, embedder: {embedder}}}}}"
        return reward_identity(job("reward=parts", parts).inputs)

    assert named("start") == named(f"{tmp_path}/same") != named(f"{rm}")
