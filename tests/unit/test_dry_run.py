"""A dry run before anything is downloaded but config.json and the tokenizer; and what it says of
memory, beside what autograd holds.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llamarl.comm.groups import World
from llamarl.config.command_line import compose_config
from llamarl.errors import BadInput, NoWeights
from llamarl.launch.dry_run import dry_run
from llamarl.launch.inputs import check_inputs
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory
from llamarl.learning.logprobs import make_head
from llamarl.learning.memory import (
    MicrobatchSize,
    activation_bytes,
    layer_elements,
    longest_microbatch,
)
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, random_weights
from llamarl.models.config import read_config, tiny_directory
from tests.scorers import write_scorer
from tests.unit.test_classifier import write_encoder

pytestmark = pytest.mark.timeout(120)

ENCODER = ("reward=encoder", "reward.label=mild", "reward.max_tokens=32")
LLAMA_405B = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def without_weights(path: Path, **fields) -> Path:
    """The tiny model's tokenizer and a config.json with these fields."""
    shutil.copytree(tiny_directory(), path)
    (path / "model.safetensors").unlink()
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | fields))
    return path


def job_of(*overrides: str, ranks: int = 1) -> Job:
    config = compose_config(list(overrides))
    return Job(config, World(0, ranks, torch.device("cpu")), RunDirectory(Path("."), None))


def said(capsys, *overrides: str, ranks: int = 1) -> str:
    job = job_of("+dry_run=true", *overrides, ranks=ranks)
    check_inputs(job)
    dry_run(job)
    return capsys.readouterr().out


def test_405b_on_512_ranks_is_priced_by_its_config_alone(tmp_path, capsys):
    model = without_weights(tmp_path / "405b", **LLAMA_405B)
    given = (f"model.path={model}", "groups_per_step=256", "model.dtype=bfloat16")
    output = said(capsys, *given, ranks=512)
    # Twice the embedding; of a layer q and o, k and v, three of the MLP, and two norms; a norm.
    d, f, kv = 16384, 53248, 1024
    layer = 2 * d * d + 2 * kv * d + 3 * f * d + 2 * d
    parameters = 2 * 128256 * d + 126 * layer + d
    assert f"{parameters:,} parameters" in output and "rank 511 " in output
    assert "bytes a sync" in output and "with trainer.activation_checkpointing=true" in output
    assert f"weights  not there yet: {model / 'model.safetensors'}" in output
    with pytest.raises(BadInput, match=r"model\.safetensors: no such file"):
        check_inputs(job_of(*given, ranks=512))


@pytest.mark.parametrize(
    "write, overrides",
    [
        (write_scorer, ("reward=model", "reward.path={}")),
        (write_scorer, ("eval.gold={}",)),
        (
            write_encoder,
            ("reward=encoder", "reward.path={}", "reward.label=mild", "reward.max_tokens=32"),
        ),
        (write_encoder, ("eval.embedder={}", "eval.num_samples=2")),
    ],
    ids=["scorer", "gold", "encoder", "embedder"],
)
def test_models_beside_the_policy_need_no_weights_either(tmp_path, capsys, write, overrides):
    write(tmp_path / "beside")
    (tmp_path / "beside" / "model.safetensors").unlink()
    given = [override.format(tmp_path / "beside") for override in overrides]
    assert f"weights  not there yet: {tmp_path / 'beside'}" in said(capsys, *given)
    with pytest.raises(BadInput, match="no model.safetensors|no such file"):
        check_inputs(job_of(*given))


def test_a_shard_that_is_missing_is_named_and_a_broken_one_still_refused(tmp_path, capsys):
    model = Path(shutil.copytree(tiny_directory(), tmp_path / "model"))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "not there yet: " in said(capsys, f"model.path={model}")
    (model / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(BadInput, match="not a whole safetensors file"):
        check_inputs(job_of("+dry_run=true", f"model.path={model}"))
    assert issubclass(NoWeights, FileNotFoundError)


# --- Memory ---


def test_the_longest_microbatch_is_of_one_prompt_where_a_group_is_over_the_budget():
    sizes = dict(prompt_tokens=4500, completion_tokens=64, group_size=2)
    assert longest_microbatch(**sizes, budget_tokens=1024) == MicrobatchSize(1, 1, 4500, 64)
    assert longest_microbatch(**sizes, budget_tokens=4629) == MicrobatchSize(1, 2, 4500, 64)
    assert longest_microbatch(**sizes, budget_tokens=9300) == MicrobatchSize(2, 4, 4500, 64)
    whole = longest_microbatch(**sizes, budget_tokens=1024, whole_groups=True)
    assert whole == MicrobatchSize(1, 2, 4500, 64) and whole.tokens == 4628


def held_bytes(layers: int, size: MicrobatchSize, dtype: torch.dtype, checkpointing: bool) -> int:
    """Bytes of what autograd holds after the forward of a microbatch, but for the weights."""
    values = read_config(tiny_directory())
    config = replace(values, num_hidden_layers=layers, max_position_embeddings=8192)
    decoder = random_weights(build_decoder(config, dtype=dtype), seed=0).train()
    decoder.activation_checkpointing = checkpointing
    lengths = [size.prompt_tokens] + [size.completion_tokens] * size.completions
    parents = [-1] + [0] * size.completions
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.randint(0, config.vocab_size, (size.tokens,))
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(size.prompt_tokens, size.tokens)
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    held = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention = PackedAttention(starts, torch.tensor(parents))
        out = decoder(tokens, positions, attention, make_head(tokens[rows], rows))
    total = sum(storage.nbytes() for storage in held.values())
    del out
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "size",
    [
        MicrobatchSize(1, 1, 1500, 100),
        MicrobatchSize(1, 1, 100, 1500),
        MicrobatchSize(1, 4, 1000, 64),
    ],
    ids=["prompt", "completion", "group"],
)
def test_what_a_layer_holds_is_what_is_counted(dtype, size):
    """The second of two layers, so that what all layers share is not of it."""
    one, two = (held_bytes(layers, size, dtype, False) for layers in (1, 2))
    config = read_config(tiny_directory())
    counted = layer_elements(config, size, tensor_parallel=1) * dtype.itemsize
    assert two - one == pytest.approx(counted, rel=0.05)


def test_a_checkpointed_layer_holds_what_comes_into_it():
    size = MicrobatchSize(1, 1, 1500, 100)
    one, two = (held_bytes(layers, size, torch.float32, True) for layers in (1, 2))
    width = read_config(tiny_directory()).hidden_size
    assert two - one == pytest.approx(4 * size.tokens * width, rel=0.05)


def test_a_prompt_costs_its_length_times_the_layers_and_checkpointing_saves_most_of_it():
    config = replace(read_config(tiny_directory()), num_hidden_layers=30)
    options = dict(itemsize=2, checkpointing=False)
    short, long = (
        activation_bytes(config, MicrobatchSize(1, 1, tokens, 64), **options)
        for tokens in (2048, 4096)
    )
    assert long / short == pytest.approx(2, rel=0.1)
    saved = activation_bytes(config, MicrobatchSize(1, 1, 4096, 64), itemsize=2, checkpointing=True)
    assert saved < long / 5


def test_it_lists_what_evaluations_ask_where_there_are_sets(capsys):
    given = ("eval.num_prompts=6", "eval.sets={sums: {kind: addition, num_prompts: 4}}")
    output = said(capsys, *given)
    assert "held out the task's own: 6 prompts of addition, the first '25+60='" in output
    assert "held out sums: 4 prompts of addition, the first '25+60='" in output
    assert "held out sums: not asked, with eval.every=0" in said(capsys, *given, "eval.every=0")
    assert "held out " not in said(capsys, "eval.num_prompts=6")
