"""What a user can give that cannot be used: found before a run has a directory, in a dry run too,
by file and field.
"""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llamarl.launch import sources
from llamarl.launch.checks import check_inputs
from llamarl.launch.sources import check_sources, samples_of
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import load_weights
from llamarl.scoring.kinds.function import FunctionKind
from llamarl.types import MESSAGES_KEY
from tests.build.model_directory import copy_tiny, write_model
from tests.build.rows import write_rows
from tests.build.user_module import write_modules
from tests.judge_server import JudgeServer
from tests.padded import padded_directory
from tests.random_models import swap_tokens
from tests.unit.refusals import change, complaint, model_job, model_refusal

BAD_INPUT = 2
FIRST = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path):
    """A copy of the embedded model, to be spoilt."""
    return copy_tiny(tmp_path / "model")


def change_weights(model: Path, **tensors) -> None:
    """Tensors by name, None to leave one out."""
    tensors = load_file(model / "model.safetensors") | tensors
    save_file({k: v for k, v in tensors.items() if v is not None}, model / "model.safetensors")


# --- The model ---


@pytest.mark.parametrize(
    "tensors, said",
    [
        ({FIRST: None}, f"{FIRST}: absent"),
        ({FIRST: torch.zeros(512, 96)}, f"{FIRST}: shape (512, 96), the config says (512, 192)"),
        (
            {"model.layers.4.mlp.up_proj.weight": torch.zeros(2)},
            "model.layers.4.mlp.up_proj.weight: not in this architecture",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_as_loading_them_does(model, tensors, said):
    change_weights(model, **tensors)
    message = model_refusal(model)
    assert f"{model}: weights do not fit config.json" in message and said in message
    with pytest.raises(ValueError) as loading:
        load_weights(build_decoder(read_config(model)), model)
    assert str(loading.value) == message
    assert message.splitlines()[1:] == [f"  {said}"]


def spoil(file: Path, spoilt: str | dict) -> None:
    """Give a file this text, or keys of its JSON other values."""
    if isinstance(spoilt, str):
        file.write_text(spoilt)
    else:
        change(file, **spoilt)


def test_a_head_of_its_own_is_needed_where_it_is_not_tied_and_is_the_embedding_where_it_is(model):
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(model, **{"lm_head.weight": embedding.clone()})
    check_inputs(model_job(model).inputs)
    change_weights(model, **{"lm_head.weight": torch.zeros(52, 192)})
    said = "lm_head.weight differs from model.embed_tokens.weight"
    assert said in model_refusal(model)
    change_weights(model, **{"lm_head.weight": None})
    change(model / "config.json", tie_word_embeddings=False)
    assert "lm_head.weight: absent" in model_refusal(model)


def test_routes_of_a_model_without_experts_are_not_replayed(model):
    said = model_refusal(model, "trainer.routing_replay=true")
    assert "LlamaForCausalLM has no experts; set trainer.routing_replay=false" in said


def test_routes_that_cannot_be_replayed_are_refused_by_the_class_that_chooses(model):
    change(
        model / "config.json",
        architectures=["PhimoeForCausalLM"],
        model_type="phimoe",
        num_local_experts=4,
    )
    said = model_refusal(model, "trainer.routing_replay=true")
    assert "chooses experts in PhimoeSparseMoeBlock otherwise than by one topk" in said


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "name, spoilt, said",
    [
        ("model.safetensors.index.json", "{", "not JSON"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "no weight_map"),
        ("config.json", {"rope_parameters": LONGROPE}, "rope_scaling type 'longrope' is not supp"),
        ("config.json", {"rope_scaling": {"type": "linear"}}, "of type 'linear' lacks factor"),
        ("config.json", {"rope_scaling": "linear"}, "rope_scaling='linear': need an object"),
        ("config.json", {"hidden_size": "192"}, "hidden_size='192': need a whole number"),
        ("config.json", {"vocab_size": 0}, "vocab_size=0: need a whole number"),
        (
            "config.json",
            {"architectures": ["BloomForCausalLM"]},
            "BloomForCausalLM: transformers makes Llama",
        ),
        ("tokenizer.json", "{", ""),
        ("tokenizer_config.json", "[]", ""),
        ("generation_config.json", "{", ""),
        ("generation_config.json", {"eos_token_id": [2, 52]}, "eos_token_id=52, but config.json"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id='2': need a token id"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(model, name, spoilt, said):
    spoil(model / name, spoilt)
    message = model_refusal(model)
    assert message.startswith(f"{model / name}: ") and said in message and "\n" not in message


@pytest.mark.parametrize(
    "section, given",
    [
        ("trainer", ("placement.trainer=[0,1]",)),
        ("generator", ("placement.generator=[1,2]", "generator.quantize=none")),
        ("reference", ("reference=frozen", "loss.kl_coef=0.1", "placement.reference=[1,2]")),
        ("reward", ("reward=model", "reward.path=MODEL", "placement.reward=[1,2]")),
    ],
)
def test_ranks_that_cannot_share_transformers_modules_are_refused(model, section, given):
    change(model / "config.json", architectures=["GPT2LMHeadModel"], model_type="gpt2")
    words = [word.replace("MODEL", str(model)) for word in given]
    key = f"{section}.tensor_parallel"
    said = complaint(f"model.path={model}", "model=hf", *words, f"{key}=2", ranks=3)
    assert f"{key}=2" in said
    assert "2 ranks cannot share its layers: transformers has no plan for it" in said
    assert f"set {key}=1" in said and ("by FSDP" in said) == (section == "trainer")


# --- The value model ---


def value_model(model: Path, **values) -> Path:
    """What a reward model's directory is, made of the policy's."""
    path = Path(shutil.copytree(model, model.parent / "critic"))
    change(path / "config.json", architectures=["LlamaForSequenceClassification"])
    change(path / "config.json", **{"id2label": {"0": "reward"}, **values})
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"score.weight": torch.zeros(1, 192)}, path / "model.safetensors")
    return path


def own_critic(path: Path) -> tuple[str, ...]:
    critic = ("trainer.critic.trunk=own", f"trainer.critic.path={path}")
    return ("loss=ppo", "trainer.advantages=gae", *critic)


def test_a_reward_model_and_a_language_model_can_start_a_value_model(model):
    check_inputs(model_job(model, *own_critic(value_model(model))).inputs)
    check_inputs(model_job(model, *own_critic(model)).inputs)


def test_a_value_model_that_starts_beside_rescaled_rewards_is_warned_of(model, caplog):
    path = value_model(model)
    words = (*own_critic(path), "reward=model", f"reward.path={path}")
    check_inputs(model_job(model, *words).inputs)
    assert "raw scores" not in caplog.text
    check_inputs(model_job(model, *words, "reward.scale=2", "reward.shift=0.5").inputs)
    assert "(score - reward.shift=0.5) * reward.scale=2" in caplog.text


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"id2label": {"0": "bad", "1": "good"}}, "a head of 2 labels (bad, good)"),
        ({"id2label": ["good"]}, "config.json: id2label=['good']: need an object with"),
        ({"vocab_size": 40}, "its vocabulary is not that of the policy"),
        ({"max_position_embeddings": 8}, "the value model's context is 8, but"),
        ({"intermediate_size": 100}, "weights do not fit config.json"),
    ],
)
def test_a_value_model_that_does_not_fit_is_refused(model, changes, said):
    path = value_model(model, **changes)
    message = model_refusal(model, *own_critic(path))
    assert message.startswith(str(path)) and said in message


def test_a_value_model_of_other_tokens_is_refused(model):
    path = value_model(model)
    swap_tokens(path)
    assert "its vocabulary is not that of the policy" in model_refusal(model, *own_critic(path))


TEACHER = "loss=distill reference.path={}"


def test_a_teacher_may_have_another_architecture_and_a_padded_vocabulary(model, tmp_path):
    padded = padded_directory(tmp_path / "padded")
    check_inputs(model_job(model, *TEACHER.format(padded).split()).inputs)
    check_inputs(model_job(padded, *TEACHER.format(model).split()).inputs)
    wide = {"vocab_size": 64, "hidden_size": 96, "num_hidden_layers": 2}
    write_model(tmp_path / "wide", json.loads((model / "config.json").read_text()) | wide)
    check_inputs(model_job(model, *TEACHER.format(tmp_path / "wide").split()).inputs)


@pytest.mark.parametrize("key", ["reference.path", "reference.teachers.b"])
def test_a_teacher_of_other_tokens_is_refused_with_both_paths_and_the_first_of_them(
    model, tmp_path, key
):
    other = copy_tiny(tmp_path / "teacher")
    swap_tokens(other)
    words = ["loss=distill", f"{key}={other}", f"reference.path={other}"]
    if key != "reference.path":
        parts = "task.parts={b: {kind: addition}, c: {kind: addition}}"
        words = ["loss=distill", f"{key}={other}", f"reference.path={model}", "task=mixture", parts]
    said = model_refusal(model, *words)
    assert said.startswith(f"{key}={other}: its vocabulary is not that of the policy, {model}")
    assert f"token '7' has id 11, and id 12 in {other}; need a model with the same" in said


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"vocab_size": 40}, "and {} has 40 rows"),
        ({"max_position_embeddings": 8}, "its context is 8 tokens, but"),
        ({"intermediate_size": 100}, "weights do not fit config.json"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(model, tmp_path, changes, said):
    other = copy_tiny(tmp_path / "teacher", **changes)
    assert said.format(other) in model_refusal(model, *TEACHER.format(other).split())


def test_fragments_that_keep_no_projection_are_refused_where_something_is_quantised(model):
    check_inputs(model_job(model, "generator.quantize_exclude=[foo]").inputs)
    int8 = "generator.quantize=int8"
    check_inputs(model_job(model, int8).inputs)
    message = model_refusal(model, int8, "generator.quantize_exclude=[down_proj,foo]")
    assert "generator.quantize_exclude=['down_proj', 'foo']" in message
    assert "['foo']: no weight is named so" in message


# --- Tokens ---


def test_a_token_beyond_the_vocabulary_is_named(model):
    change(model / "tokenizer_config.json", eos_token="<another>")
    said = "token '<another>' has id 52, but config.json says vocab_size=52"
    assert f"{model / 'tokenizer.json'}: {said}" in model_refusal(model)


def test_rows_without_a_token_are_counted_once(tmp_path, caplog):
    model = padded_directory(tmp_path / "padded")
    with caplog.at_level(logging.WARNING, "llamarl"):
        check_inputs(model_job(model).inputs)
    (said,) = [r.getMessage() for r in caplog.records if "vocabulary rows" in r.getMessage()]
    assert "12 of its 64 vocabulary rows have no token in the tokenizer (ids 52-63)" in said


def test_a_model_without_stop_tokens_is_warned_of(model, caplog):
    change(model / "generation_config.json", eos_token_id=None)
    change(model / "tokenizer_config.json", eos_token=None)
    with caplog.at_level(logging.WARNING, "llamarl"):
        check_inputs(model_job(model).inputs)
    assert f"{model}: no eos token" in caplog.text


@pytest.mark.parametrize(
    "name, spoilt",
    [
        ("chat_template.jinja", "{{ raise_exception('no users here') }}"),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}),
    ],
)
def test_a_chat_template_that_raises_is_named(model, name, spoilt):
    spoil(model / name, spoilt)
    message = model_refusal(model, "task.chat=true")
    assert message.startswith(f"{model / name}: its chat template failed")
    assert "or set task.chat=false" in message and "\n" not in message
    check_inputs(model_job(model, "task.chat=false").inputs)


# --- Launched ---


@pytest.mark.parametrize(
    "overrides, said",
    [
        (("+dry_run=true", "max_new_tokens=1000"), "the model's context is 512"),
        (("reward.fn=tests.launching:fails",), "failed on all 3 samples: RuntimeError: no verdict"),
        (("eval.gold=tests.launching:fails",), "eval.gold=tests.launching:fails: failed on all 3"),
        (("reward.fn=nosuch:fn",), "reward.fn=nosuch:fn: no module nosuch"),
    ],
)
def test_a_run_and_a_dry_run_end_with_one_line_and_leave_no_directory(
    launch_here, tmp_path, overrides, said
):
    code, output = launch_here(*overrides, f"run_dir={tmp_path / 'run'}")
    assert code == BAD_INPUT and "Traceback" not in output.err
    (line,) = [line for line in output.err.splitlines() if line.startswith("llamarl: ")]
    assert said in line
    assert not (tmp_path / "run").exists()


SAMPLED = '''
seen = []


def fails_in_other_ways(prompt, completion, meta):
    """Two errors of one kind and one of another: the third says what it was given."""
    seen.append(completion)
    if len(seen) < 3:
        raise KeyError(len(seen))
    raise RuntimeError(f"{completion} {meta['answer']} {meta['sampled']}")


def abstains(prompt, completion, meta):
    return None


def missing(prompt, completion, meta):
    import a_package_that_is_not_there


def empty(prompts, completions, metas):
    return ()
'''


@pytest.fixture
def tried(tmp_path, monkeypatch, launch_here):
    """tried(name, *overrides): exit code and what was said of a start with a function that is tried
    on samples; the run ends for another reason, once everything of the user's is looked at.
    """
    write_modules(tmp_path, monkeypatch, mine=SAMPLED)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "in_the_way").touch()

    def start(name, *overrides):
        code, output = launch_here(f"reward.fn=mine:{name}", "run_dir=run", *overrides)
        return code, output.err

    return start


def test_a_function_is_refused_for_one_kind_of_error_on_all_samples_alone(tried):
    code, said = tried("fails_in_other_ways")
    assert code == BAD_INPUT and "holds a run already" in said and "failed on all" not in said
    assert "fails on 3 of the 3 samples that it was tried on, and scores none" in said
    code, said = tried("abstains")
    assert "holds a run already" in said and "abstains on 3 of the 3 samples" in said
    code, said = tried("empty")
    assert "failed on all 3 samples: ValueError: returned 0 values for 1 completions" in said
    code, said = tried("missing")
    assert code == BAD_INPUT and "holds a run already" not in said
    assert "reward.fn=mine:missing: failed on all 3 samples: ModuleNotFoundError: No module" in said
    lines = said.splitlines()
    frame = next(line for line in lines if "mine.py" in line and "in missing" in line)
    assert frame.endswith("import a_package_that_is_not_there")
    assert lines[-1].startswith("correct the function, or go on without its scores: reward.max_err")
    code, said = tried("missing", "reward.max_error_rate=1")
    assert "holds a run already" in said and "fails on 3 of the 3 samples" in said


def test_the_samples_are_the_rows_own_answers_as_they_would_be_sampled(model):
    run = model_job(model)
    samples = samples_of(run.inputs)
    assert len(samples) == 3
    for number, item in enumerate(samples):
        asked = run.inputs.task.train_prompt(number)
        text = asked.meta["answer"]
        assert (item.prompt.text, item.text) == (asked.text, text)
        sampled = item.meta["sampled"]
        assert sampled["ended"] and sampled["num_tokens"] == len(sampled["token_ids"])
        assert sampled["token_ids"][-1] == run.inputs.tokenizer.eos_token_id
        assert run.inputs.decode(sampled["token_ids"]) == text
        assert sampled["raw_text"] == text + run.inputs.tokenizer.eos_token


def files_of(tmp_path, *rows):
    """Return the words that name a file with these rows, all of them for training."""
    file = write_rows(tmp_path / "rows.jsonl", *rows)
    return (f"task.path={file}", f"task.eval_path={file}")


def test_a_sample_of_a_conversation_has_its_turns(model, tmp_path):
    template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    change(model / "tokenizer_config.json", chat_template=template)
    turns = [{"role": "system", "content": "7"}, {"role": "user", "content": "1+1"}]
    files = files_of(tmp_path, *[{"prompt": turns, "answer": "2"}] * 3)
    for item in samples_of(model_job(model, "task=jsonl", *files).inputs):
        assert (item.prompt.text, item.text) == ("system: 7\n\nuser: 1+1", "2")
        assert item.meta[MESSAGES_KEY] == turns


def rows_job(model, tmp_path, answers, *words):
    """Return the job of a file with these answers."""
    rows = [{"prompt": f"{n}+0=", "answer": answer} for n, answer in enumerate(answers)]
    words = (*files_of(tmp_path, *rows), "task.max_prompt_tokens=24", *words)
    return model_job(model, "task=jsonl", "task.chat=false", *words)


def test_rows_that_a_reward_can_never_score_are_counted_before_the_run(model, tmp_path, caplog):
    answers = ["1", "2", ["3"], "4", True, "6", "7", "8"]
    check_sources(rows_job(model, tmp_path, answers, "reward.max_error_rate=0.5").inputs)
    assert "2 of 8 training rows get no score from llamarl.tasks.rewards:exact_match" in caplog.text
    assert "rows.jsonl:3: ValueError: the answer is list ['3']" in caplog.text
    assert "rows.jsonl:5: ValueError: the answer is bool True" in caplog.text
    with pytest.raises(ValueError, match="(?s)2 of 8 .*above reward.max_error_rate=0.1: correct"):
        check_sources(rows_job(model, tmp_path, answers, "reward.max_error_rate=0.1").inputs)


def test_a_row_that_a_reward_can_score_is_not_spoken_of(model, tmp_path, caplog):
    check_sources(rows_job(model, tmp_path, ["1", 2, 3.0, "four"]).inputs)
    assert "get no score" not in caplog.text


@pytest.mark.parametrize(
    "name, answer, words, said",
    [
        ("numeric_match", "four", (), "holds no number"),
        ("math_match", r"\frac{", (), "is no formula"),
        (
            "python_tests",
            "4",
            ("reward.options.tests=answer",),
            "the row's 'answer' is 4; need a text of code",
        ),
    ],
)
def test_a_reward_checks_the_rows_that_it_compares_with(model, tmp_path, name, answer, words, said):
    words = (f"reward.fn=rewards:{name}", "reward.max_error_rate=0.1", *words)
    with pytest.raises(ValueError, match=said):
        check_sources(rows_job(model, tmp_path, [answer] * 4, *words).inputs)


def test_of_many_rows_some_are_checked_evenly_apart(model, tmp_path, caplog):
    answers = ["1"] * 600
    answers[300] = answers[301] = [1]  # of each three the first is looked at
    check_sources(rows_job(model, tmp_path, answers).inputs)
    assert "1 of 200 training rows, one in 3, get no score" in caplog.text
    assert "rows.jsonl:301: " in caplog.text


def test_a_check_of_rows_that_takes_long_says_so_and_ends(model, tmp_path, caplog, monkeypatch):
    def of_the_first(kind, rows, wait_longer):
        assert not wait_longer()
        return ["", *[None] * (len(rows) - 1)]

    monkeypatch.setattr(FunctionKind, "row_problems", of_the_first)
    monkeypatch.setattr(sources, "CHECK_S", 0.0)
    monkeypatch.setattr(sources, "QUIET_S", 0.0)
    with caplog.at_level(logging.INFO, "llamarl"):
        check_sources(rows_job(model, tmp_path, ["1"] * 8).inputs)
    name = "llamarl.tasks.rewards:exact_match"
    assert f"{name} looks at 8 training rows, for 0 s at most" in caplog.text
    assert f"{name}: looked at 1 of 8 training rows in 0 s, and stopped" in caplog.text


def mixture(part: str, tmp_path, *rows: dict) -> tuple[str, str]:
    """Return the words of a mixture of a part and of these rows behind it."""
    files = ", ".join(
        word.removeprefix("task.").replace("=", ": ") for word in files_of(tmp_path, *rows)
    )
    mine = f"{{kind: jsonl, {files}, chat: false, max_prompt_tokens: 64}}"
    return ("task=mixture", f"task.parts={{sums: {part}, mine: {mine}}}")


def test_rows_of_a_mixture_are_checked_by_the_reward_of_their_part(model, tmp_path):
    sums = "{kind: questions, name: sum, most: 20, chat: false, max_prompt_tokens: 64}"
    words = mixture(sums, tmp_path, *[{"prompt": "1+1=", "answer": [2]}] * 3)
    with pytest.raises(ValueError, match="the answer is list"):
        check_sources(model_job(model, *words, "reward.max_error_rate=0").inputs)


def test_a_column_of_rows_where_a_reward_finds_the_part_of_a_mixture_is_refused(model, tmp_path):
    row = {"prompt": "1+1=", "answer": "2"}
    check_inputs(model_job(model, *mixture("{kind: addition}", tmp_path, row)).inputs)
    words = mixture("{kind: addition}", tmp_path, {**row, "part": "first half"})
    message = model_refusal(model, *words)
    assert message.startswith('task.parts.mine: the key "part" of a row')


def test_a_judge_is_asked_once_and_about_no_sample(model):
    """Its replies may cost money."""
    with JudgeServer(lambda question: "5") as server:
        words = ("reward=judge", f"reward.url={server.url}", "reward.model=wise")
        check_sources(model_job(model, *words).inputs)
        assert len(server.paths) == 1 and server.questions == []
    with pytest.raises(ValueError, match=f"reward.url={server.url}"):
        check_sources(model_job(model, *words, "reward.max_retries=0", "reward.timeout_s=5").inputs)
