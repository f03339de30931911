"""recipes/push.py: what is uploaded loads, its card tells how it was trained and nothing about the
machine, and what goes wrong is one line.
"""

import json
import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from llamarl.config.command_line import RED_TEAM, RL, compose_config, default_config
from llamarl.config.conversion import to_values
from llamarl.config.supervised import REWARD_MODEL, SFT
from llamarl.models.config import tiny_directory
from recipes import push
from tests.build.model_directory import same_tensors
from tests.hub_server import HubServer
from tests.launching import EVAL_PROMPTS, STEPS

REPO = "repo=me/mine"


@pytest.fixture
def run_dir(synchronous_run, tmp_path):
    return shutil.copytree(synchronous_run.run_dir, tmp_path / "run", symlinks=True)


@pytest.fixture
def hub(monkeypatch):
    """A function that starts a hub, for a user with a token."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_user")
    started = []

    def start(**options):
        started.append(HubServer(**options))
        monkeypatch.setattr(constants, "ENDPOINT", started[-1].url)
        return started[-1]

    yield start
    for server in started:
        server.close()


def refusal(capsys, *words):
    assert push.main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("push: ")
    return said.err.removeprefix("push: ").removesuffix("\n")


def test_a_dry_run_writes_a_model_that_loads_and_a_card_of_its_run(
    run_dir, synchronous_run, capsys
):
    assert push.main([f"run_dir={run_dir}", REPO, "dry_run=true"]) == 0
    folder = run_dir / "push"
    said = capsys.readouterr().out
    assert said.startswith((folder / "README.md").read_text())
    assert all(f"file     {file.name}  " in said for file in folder.iterdir())
    trained = run_dir / "checkpoints" / f"step_{STEPS}" / "hf"
    assert same_tensors(folder / "model.safetensors", trained / "model.safetensors")
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 1_000_000
    assert AutoTokenizer.from_pretrained(folder)("1+2=").input_ids
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.tags == ["llamarl", "reinforcement-learning", "aipo"]
    assert card.data.base_model is None
    first, last = (synchronous_run.rows[step]["eval/accuracy"] for step in (0, STEPS))
    assert f"| accuracy | {first:.1%} → {last:.1%} |" in card.text
    assert f"| `eval.num_prompts` | `{EVAL_PROMPTS}` |" in card.text
    assert 'from_pretrained("me/mine")' in card.text and f"after step {STEPS}" in card.text
    assert f"torch {torch.__version__}" in card.text
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    for file in folder.iterdir():
        assert str(run_dir.parent).encode() not in file.read_bytes(), file


def test_the_card_of_an_earlier_step_knows_nothing_of_later_ones(run_dir, synchronous_run):
    assert push.main([f"run_dir={run_dir}", REPO, "step=2", "dry_run=true"]) == 0
    card = (run_dir / "push" / "README.md").read_text()
    assert "| steps | 2 |" in card and "after step 2." in card
    assert f"→ {synchronous_run.rows[2]['eval/accuracy']:.1%} |" in card


def test_an_upload_replaces_earlier_weights_and_leaves_other_files(run_dir, hub, capsys):
    earlier = {"model-00001-of-00002.safetensors": b"old", "notes.md": b"mine", "README.md": b"old"}
    server = hub(files=earlier)
    assert push.main([f"run_dir={run_dir}", REPO]) == 0
    assert capsys.readouterr().out == f"pushed   step {STEPS} to {server.url}/me/mine/commit/1\n"
    hf = run_dir / "checkpoints" / "latest" / "hf"
    names = {file.name for file in hf.iterdir()}
    assert server.files.keys() == names | {"README.md", "curve.png", "notes.md"}
    for name in names:
        assert server.files[name] == (hf / name).read_bytes()
    assert server.files["README.md"].startswith(b"---\nlibrary_name: transformers\n")
    assert "Bearer hf_of_a_user" in server.tokens
    (created,) = server.created
    assert (created["organization"], created["name"]) == ("me", "mine")
    assert created["visibility"] == "private"


def test_adapters_name_their_base_and_not_where_it_was(run_dir):
    adapter = run_dir / "checkpoints" / f"step_{STEPS}" / "adapter"
    adapter.mkdir()
    fields = {"r": 4, "base_model_name_or_path": str(tiny_directory())}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    given = (f"run_dir={run_dir}", REPO, "adapters=true", "dry_run=true")
    for base, named in (("base_model=me/base", "me/base"), ("base_model=null", "tiny")):
        assert push.main([*given, base]) == 0
        config = json.loads((run_dir / "push" / "adapter_config.json").read_text())
        assert config == {"r": 4, "base_model_name_or_path": named}
        card = ModelCard.load(run_dir / "push" / "README.md")
        assert card.data.library_name == "peft" and "AutoPeftModelForCausalLM" in card.text
        assert (card.data.base_model == "me/base") == (named == "me/base")


@pytest.mark.parametrize(
    "status, said",
    [
        (
            401,
            "the Hub does not know this token (not for you); run `hf auth login`, or set HF_TOKEN",
        ),
        (403, "this token may not write to me/mine (not for you); use one with write access there"),
    ],
)
def test_a_hub_that_refuses_is_one_line(run_dir, hub, capsys, status, said):
    hub(files={}, refuses=status)
    assert refusal(capsys, f"run_dir={run_dir}", REPO) == said


def test_without_a_token_or_a_network_it_says_so_in_one_line(run_dir, hub, monkeypatch, capsys):
    server = hub(files={})
    server.close()  # nobody listens there any more
    said = refusal(capsys, f"run_dir={run_dir}", REPO)
    assert re.fullmatch(rf"{server.url} cannot be reached: .*", said)
    monkeypatch.setattr(push, "get_token", lambda: None)
    said = refusal(capsys, f"run_dir={run_dir}", REPO)
    assert said == "no token; run `hf auth login`, or set HF_TOKEN"


def test_what_cannot_be_pushed_is_one_line(run_dir, tmp_path, capsys):
    def said(*words, run=run_dir):
        return refusal(capsys, f"run_dir={run}", *words, "dry_run=true")

    none = said(REPO, run=tmp_path)
    assert (
        none == f"{tmp_path}: no run (it has no config.yaml); give the run_dir that the run printed"
    )
    assert said(REPO, "step=3") == f"{run_dir}: no checkpoint of step 3; it has step_2, step_4"
    checkpoint = run_dir / "checkpoints" / "step_4"
    remedy = "the run trained all weights: adapters=false"
    assert said(REPO, "adapters=true") == f"{checkpoint}: has no adapter/; {remedy}"
    assert said("repo=mine") == "repo=mine: write OWNER/NAME"
    assert "'me/a b'" in said("'repo=me/a b'".strip("'"))
    (checkpoint / "hf" / "config.json").unlink()
    assert said(REPO) == f"checkpoint {checkpoint} is damaged: hf/config.json: absent"
    shutil.rmtree(run_dir / "checkpoints")
    assert said(REPO) == f"{run_dir}: no checkpoint; a run writes one at its end"


TINY = f"model.path={tiny_directory()}"


@pytest.mark.parametrize(
    "kind, words, changed",
    [
        (RL, [], {}),
        (RL, ["loss=grpo", "lr=3e-6", "seed=7", "checkpoint.keep=3"], {"lr": "3e-06"}),
        (
            RL,
            ["task=jsonl", f"task.path={__file__}", TINY],
            {"task.path": "test_push.py"},
        ),
        (
            RL,
            ["reward=judge", "reward.url=http://10.0.0.1:8000/v1", "reward.model=m"],
            {"reward.url": "v1", "reward.model": "m"},
        ),
        (SFT, [TINY, "task=addition", "lr=1e-3"], {"lr": "0.001"}),
        (
            REWARD_MODEL,
            [TINY, f"task.path={__file__}", "loss.center_coef=0.1"],
            {"task.path": "test_push.py", "loss.center_coef": "0.1"},
        ),
    ],
)
def test_the_settings_of_a_card_are_those_that_were_changed(kind, words, changed):
    config = to_values(default_config(kind, words))
    assert push.kind_of(config).file == kind.file
    assert push.changed_settings(config, kind) == changed


def test_a_run_against_a_victim_is_told_from_one_without():
    config = to_values(compose_config(["victim=tiny"], RED_TEAM))
    assert push.kind_of(config).file == RED_TEAM.file


def test_a_run_of_another_commit_is_pushed_without_its_settings(run_dir, capsys):
    file = run_dir / "config.yaml"
    file.write_text(file.read_text().replace("kind: addition", "kind: python", 1))
    config = push.read_values(run_dir)
    config["task"] = {"kind": "python", "of_another_commit": 1}
    assert "task.of_another_commit" in push.changed_settings(config, RL)


@pytest.mark.parametrize(
    "value, shown",
    [
        ("/data/my rows/train.jsonl", "train.jsonl"),
        ("runs/a/hf/", "hf"),
        ("http://host:1/v1", "v1"),
        ("Answer yes/no, then stop.", "Answer yes/no, then stop."),
        ("my_module:my_reward", "my_module:my_reward"),
        ([{"path": "~/a.jsonl", "weight": 2}], [{"path": "a.jsonl", "weight": 2}]),
    ],
)
def test_paths_and_addresses_are_cut_to_their_last_part(value, shown):
    assert push.without_folders(value) == shown


def test_a_model_of_the_hubs_cache_is_named_as_there():
    snapshot = "~/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899d"
    assert push.hub_name(snapshot) == "Qwen/Qwen3-0.6B"
    assert push.hub_name("/models/mine") is None and push.hub_name(None) is None
