"""Models that score and cannot be used: told before anything starts, by key."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from llamarl.config.command_line import check_command_line, compose_config
from llamarl.launch.checks import check_inputs
from llamarl.launch.identity import reward_identity
from llamarl.models.config import tiny_directory
from llamarl.models.directory import model_digest
from tests.random_models import swap_tokens
from tests.scorers import write_scorer
from tests.unit.refusals import complaint, job, refusal

MODEL = "reward=model"
FROZEN = "reference=frozen"


def test_a_scorer_is_taken(tmp_path):
    write_scorer(tmp_path / "rm")
    check_inputs(job(MODEL, f"reward.path={tmp_path}/rm").inputs)


def test_a_path_is_required_and_must_be_there(tmp_path):
    assert "required: set reward.path=PATH" in complaint(MODEL)
    assert "no such file" in complaint(MODEL, f"reward.path={tmp_path}/nowhere")
    parts = "reward.parts={rm: {kind: model}}"
    assert "required: set reward.parts.rm.path=PATH" in complaint("reward=parts", parts)


def test_a_language_model_has_no_head(tmp_path):
    shutil.copytree(tiny_directory(), tmp_path / "lm")
    said = refusal(MODEL, f"reward.path={tmp_path}/lm")
    assert said.startswith(f"reward.path={tmp_path}/lm: LlamaForCausalLM is a language model")


def test_one_of_several_labels_is_named(tmp_path):
    write_scorer(tmp_path / "rm", labels=("toxic", "fine"))
    path = f"reward.path={tmp_path}/rm"
    assert "gives 2 scores; name one of toxic, fine" in refusal(MODEL, path)
    assert "has no label fin; name one of toxic, fine" in refusal(MODEL, path, "reward.label=fin")
    check_inputs(job(MODEL, path, "reward.label=fine").inputs)


def test_a_context_that_is_too_short_is_told(tmp_path):
    write_scorer(tmp_path / "rm", max_position_embeddings=100)
    said = refusal(MODEL, f"reward.path={tmp_path}/rm", "task.max_prompt_tokens=99")
    assert "its context is 100 tokens, but task.max_prompt_tokens + max_new_tokens = 105" in said


def test_a_scorer_needs_its_tokenizer(tmp_path):
    write_scorer(tmp_path / "rm")
    (tmp_path / "rm" / "tokenizer_config.json").unlink()
    assert "no tokenizer_config.json" in refusal(MODEL, f"reward.path={tmp_path}/rm")


def test_a_broken_tokenizer_of_a_scorers_is_named(tmp_path):
    write_scorer(tmp_path / "rm")
    file = tmp_path / "rm" / "tokenizer.json"
    for text, what in (
        ("[]", "need a JSON object"),
        ("{}", "transformers makes no tokenizer from it"),
    ):
        file.write_text(text)
        said = refusal(MODEL, f"reward.path={tmp_path}/rm")
        assert said.startswith(f"{file}: ") and what in said


def test_rotary_positions_that_nothing_computes_are_named_by_the_scorers_file(tmp_path):
    write_scorer(tmp_path / "rm")
    file = tmp_path / "rm" / "config.json"
    longrope = {"rope_type": "longrope", "rope_theta": 1e4}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": longrope}))
    for given in ((MODEL, f"reward.path={tmp_path}/rm"), (f"eval.gold={tmp_path}/rm",)):
        assert refusal(*given).startswith(f"{file}: rope_scaling type 'longrope' is not supported")


def test_another_vocabulary_is_noticed(tmp_path, caplog):
    write_scorer(tmp_path / "rm")
    swap_tokens(tmp_path / "rm")
    check_inputs(job(MODEL, f"reward.path={tmp_path}/rm").inputs)
    assert "has another vocabulary than the policy: it reads completions anew" in caplog.text
    template = tmp_path / "rm" / "chat_template.jinja"
    template.write_text("{{ raise_exception('no users here') }}")
    said = refusal(MODEL, f"reward.path={tmp_path}/rm", "task.chat=true")
    assert said.startswith(f"{template}: its chat template failed") and "no users here" in said
    check_inputs(job(MODEL, f"reward.path={tmp_path}/rm", "task.chat=false").inputs)


def test_a_scorer_of_other_tokens_cannot_read_ahead(tmp_path):
    write_scorer(tmp_path / "rm")
    streams = (MODEL, f"reward.path={tmp_path}/rm", "reward.stream=true")
    check_inputs(job(*streams).inputs)
    swap_tokens(tmp_path / "rm")
    assert "its vocabulary is not the policy's" in refusal(*streams)


def test_parts_take_what_they_do_not_set_from_the_files_of_their_kinds(tmp_path):
    parts = "reward.parts={rm: {kind: model, path: DIR}, brief: {kind: function, weight: 0.2}}"
    config = compose_config(
        ["reward=parts", parts.replace("DIR", str(tiny_directory())), "reward.parts.rm.scale=3"]
    )
    parts = config.reward.scorer.parts
    rm, brief = parts["rm"].scorer, parts["brief"].scorer
    assert (parts["rm"].weight, parts["brief"].weight) == (1.0, 0.2)
    assert (rm.scale, rm.dtype, rm.microbatch_tokens) == (3.0, "float32", 8192)
    assert (brief.fn, brief.num_workers) == (None, 1)
    assert config.scorers == {"reward.parts.rm": str(tiny_directory())}


@pytest.mark.parametrize(
    "parts, said",
    [
        ("{}", "needs parts"),
        ("{rm: {kind: modle}}", "did you mean model?"),
        ("{rm: {kind: function, scale: 2}}", "only reward.parts.rm.kind=model has it"),
        ("{rm: {kind: function, weight: much}}", "need a number"),
        ("{rm: 3}", "a section"),
        ("3", "sections by name"),
        ("{j: {kind: judge, url: 'http://h/v1'}}", "required: set reward.parts.j.model=MODEL"),
        (
            "{j: {kind: judge, url: 'http://h/v1', model: m, template: nowhere}}",
            "reward.parts.j.template=nowhere   no such file",
        ),
        (
            "{j: {kind: judge, url: 'http://h/v1', model: m, ask: group}}",
            "reward.parts.j.ask=reference",
        ),
    ],
)
def test_parts_that_cannot_be(parts, said):
    assert said in complaint("reward=parts", f"reward.parts={parts}")


@pytest.mark.parametrize("section, name", [("reward", "scorer"), ("reference", "reference")])
def test_ranks_that_cannot_share_a_model(tmp_path, section, name):
    write_scorer(tmp_path / "rm")
    kinds = {"reward": [MODEL, f"reward.path={tmp_path}/rm"], "reference": [FROZEN]}
    given = [*kinds[section], "placement.trainer=[0,1]"]
    placed = f"placement.{section}"
    said = complaint(*given, f"{placed}=[0,1]", ranks=3)
    assert f"would share the {name} and the trainer" in said
    check_command_line([*given, f"{placed}=[0,1]", "max_lag=0"], world_size=3)
    said = complaint(*given, f"{placed}=[1,0]", "max_lag=0", ranks=3)
    assert f"a {name} that another rank leads" in said and "begin both with rank 0" in said
    said = complaint(*given, f"{placed}=[2,3,4]", f"{section}.replicate=2", ranks=5)
    assert "a multiple of 2 ranks" in said
    split = ["placement.generator=[2,3]", "generator.tensor_parallel=2"]
    check_command_line([*given, *split, f"{placed}=[2,3]"], world_size=4)
    said = complaint(*given, *split, f"{placed}=[3,2]", ranks=4)
    assert "begin both with rank 2" in said


def test_three_that_wait_in_a_ring(tmp_path):
    """The trainer's first rank for its second, that one for rank 2 in the scorer, and rank 2 for
    the first in the reference: nobody can go on.
    """
    write_scorer(tmp_path / "rm")
    given = [FROZEN, MODEL, f"reward.path={tmp_path}/rm", "placement.generator=[3]"]
    given += ["placement.trainer=[0,1]", "placement.reward=[1,2]"]
    said = complaint(*given, "placement.reference=[2,0]", ranks=4)
    assert "each of reference, reward, trainer shares a rank with the next, in a ring" in said
    check_command_line([*given, "placement.reference=[1,3]"], world_size=4)  # all by rank 1
    check_command_line([*given, "placement.reference=[2,3]"], world_size=4)  # a chain
    split = ["placement.generator=[3,2]", "generator.tensor_parallel=2"]
    said = complaint(*given, *split, "placement.reference=[0,3]", ranks=4)
    assert "each of generator, reference, reward, trainer" in said


def test_a_scorer_has_a_query_head_for_each_of_its_ranks(tmp_path):
    write_scorer(tmp_path / "rm")  # of 4
    given = [MODEL, f"reward.path={tmp_path}/rm", "reward.tensor_parallel=5"]
    said = complaint(*given, "placement.reward=[2,3,4,5,6]", ranks=7)
    assert f"the scorer {tmp_path}/rm has 4 query heads" in said and "at most 4" in said


def test_ranks_that_cannot_share_a_scorer_and_a_reference(tmp_path):
    write_scorer(tmp_path / "rm")
    given = [FROZEN, MODEL, f"reward.path={tmp_path}/rm"]
    given += ["placement.trainer=[0,1]", "placement.reward=[2,3]"]
    check_command_line([*given, "placement.reference=[2,3]"], world_size=5)
    said = complaint(*given, "placement.reference=[3,2]", ranks=5)
    assert "would share the scorer and the reference" in said


@pytest.mark.parametrize("key", ["eval.gold", "eval.base"])
def test_ranks_that_cannot_share_a_model_that_judges(tmp_path, key):
    write_scorer(tmp_path / "rm")  # read by its config.json alone: a base of any kind will do here
    given = [f"{key}={tmp_path}/rm", "placement.trainer=[0,1]"]
    said = complaint(*given, "placement.reward=[0,1]", ranks=3)
    assert f"would share the {key} and the trainer" in said
    check_command_line([*given, "placement.reward=[0]"], world_size=3)
    check_command_line([*given, "placement.reward=[0,1]", "max_lag=0"], world_size=3)
    model = [MODEL, f"reward.path={tmp_path}/rm", "reward.tensor_parallel=5"]
    said = complaint(*given, *model, "placement.reward=[2,3,4,5,6]", ranks=7)
    assert f"the model {key}={tmp_path}/rm has 4 query heads" in said
    if key == "eval.base":
        said = complaint(
            *given, FROZEN, "placement.reward=[2,3]", "placement.reference=[3,2]", ranks=5
        )
        assert "would share the eval.base and the reference" in said


def test_a_scorer_is_known_by_what_it_is(tmp_path):
    write_scorer(tmp_path / "rm")
    write_scorer(tmp_path / "other", seed=1)
    shutil.copytree(tmp_path / "rm", tmp_path / "moved")
    known = model_digest(tmp_path / "rm")
    assert known == model_digest(tmp_path / "moved")
    assert known != model_digest(tmp_path / "other")
    weights = load_file(tmp_path / "moved" / "model.safetensors")
    trunk = next(name for name in weights if "mlp" in name)
    save_file(weights | {trunk: weights[trunk] * 1.05}, tmp_path / "moved" / "model.safetensors")
    assert known != model_digest(tmp_path / "moved"), "another trunk under the same head"


def test_novelty_is_named_by_what_its_embedder_is_and_not_by_where_it_lies(tmp_path):
    shutil.copytree(tiny_directory(), tmp_path / "same")
    write_scorer(tmp_path / "other")

    def named(embedder: str) -> str:
        parts = f"reward.parts={{new: {{kind: novelty, embedder: {embedder}}}}}"
        return reward_identity(job("reward=parts", parts).inputs)

    assert named("start") == named(f"{tmp_path}/same") != named(f"{tmp_path}/other")
