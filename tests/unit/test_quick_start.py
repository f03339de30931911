"""A start loads what it uses. Help and mistakes in a command line load no PyTorch; a run loads, up
to its first step, neither torchao nor datasets nor PyTorch's compiler.
"""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llamarl.learning.optim import build_optimizer
from llamarl.models.fsdp import is_dtensor, is_fsdp_module
from llamarl.models.hf import PLAIN_TOKENIZERS, TAKEN_AT_WORD, load_tokenizer
from tests.build.job import run_python
from tests.build.model_directory import change_json, copy_tiny
from tests.launching import JOB_S, ROOT, SMALL

HEAVY = ("torch", "torchtune", "torchao", "transformers", "datasets", "pandas", "sympy")
UNUSED = ("torchtune", "torchao", "datasets", "pandas", "torch._dynamo", "torch._inductor")
SHARDED = ("torch.distributed.tensor", "torch.distributed.fsdp", "sympy")
RECIPES = "llama_async red_team sft reward_model preferences compare fetch_smollm2".split()
# Runs recipes in turn, as `python recipes/NAME.py WORDS` does. Says after each which modules are
# loaded, and its exit code. With `until` (0: the end), says so when that step's row is written.
WATCHED = """
import json, runpy, sys

runs, until, names = json.loads(sys.argv[1])

def tell(code):
    loaded = [name for name in names if name in sys.modules]
    print("LOADED", json.dumps([loaded, code]), flush=True)

if until:
    from llamarl.observe import Jsonl

    write = Jsonl.write

    def watched(self, row):
        if row.get("step") == until:
            tell(0)
        return write(self, row)

    Jsonl.write = watched
for recipe, *words in runs:
    sys.path[0] = str(recipe.rpartition("/")[0])
    sys.argv = [recipe, *words]
    code = 0
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    if not until:
        tell(code)
"""


def loaded_by(*runs: tuple[str, ...], of: tuple[str, ...], until: int = 0) -> list[list]:
    """Run (recipe, *words) in turn, in one process. Return after each, which of some modules are
    loaded, and its exit code.
    """
    given = [[str(ROOT / "recipes" / f"{recipe}.py"), *words] for recipe, *words in runs]
    said = run_python("-c", WATCHED, json.dumps([given, until, of]))
    told = [line for line in said.splitlines() if line.startswith("LOADED")]
    return [json.loads(line.removeprefix("LOADED")) for line in told]


def test_help_and_a_mistyped_key_load_no_torch():
    """The last is a recipe with an executor of the user's own, which loads torch and builds no
    other.
    """
    runs = []
    for recipe in RECIPES:
        runs += [(recipe, "--help"), (recipe, "modle=tiny")]
    *found, (loaded, code) = loaded_by(
        *runs, ("custom_executor", "trainer.lrr=1"), of=HEAVY + UNUSED
    )
    assert found == [[[], 0], [[], 2]] * len(RECIPES)
    assert not set(UNUSED) & set(loaded) and code == 2


def test_a_run_in_one_process_loads_none_of_it_before_its_first_step(tmp_path):
    words = (*SMALL, "eval.every=0", "max_steps=1", f"run_dir={tmp_path / 'run'}")
    found = loaded_by(("llama_async", *words), of=UNUSED + SHARDED, until=1)
    assert found == [[[], 0]]


@pytest.fixture
def directory(tmp_path):
    """A copy of the embedded model, of another type or with another tokenizer; its path."""

    def make(model_type: str, tokenizer_class: str) -> Path:
        path = copy_tiny(tmp_path / "model", model_type=model_type)
        change_json(path / "tokenizer_config.json", tokenizer_class=tokenizer_class)
        return path

    return make


@pytest.mark.parametrize(
    "model_type, tokenizer_class", list(zip_longest(TAKEN_AT_WORD, PLAIN_TOKENIZERS))
)
def test_a_plain_tokenizer_is_what_transformers_makes_of_it(model_type, tokenizer_class, directory):
    path = directory(model_type or TAKEN_AT_WORD[0], tokenizer_class or PLAIN_TOKENIZERS[0])
    ours = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(path, local_files_only=True)
    assert type(ours) is type(theirs) is PreTrainedTokenizerFast
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.init_kwargs == theirs.init_kwargs
    assert ours("12+34=").input_ids == theirs("12+34=").input_ids


def test_a_directory_that_names_the_wrong_class_is_left_to_transformers(directory, monkeypatch):
    path = directory("qwen2", "PreTrainedTokenizerFast")
    asked = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, **_: asked.append(path))
    load_tokenizer(path)
    assert asked == [path]


def test_the_optimizer_gives_the_bits_of_pytorchs():
    draw = torch.Generator().manual_seed(0)
    first = [torch.randn(5, 3, generator=draw), torch.randn(3, generator=draw)]
    ours = [nn.Parameter(value.clone()) for value in first]
    theirs = [nn.Parameter(value.clone()) for value in first]
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    own = build_optimizer(ours, weight_decay=0.01, **settings)
    decayed = {"params": theirs[:1], "weight_decay": 0.01}
    vectors = {"params": theirs[1:], "weight_decay": 0.0}
    pytorchs = torch.optim.AdamW([decayed, vectors], fused=True, **settings)
    seen = []
    own.register_step_post_hook(lambda *_: seen.append("after"))
    for _ in range(3):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape, generator=draw)
            q.grad = p.grad.clone()
        own.step()
        pytorchs.step()
        assert_close(ours, theirs, rtol=0, atol=0)
    assert seen == ["after"] * 3
    own.zero_grad()
    assert all(p.grad is None for p in ours)


def test_what_is_sharded_is_known_on_every_rank(pool):
    assert pool.call(__file__, "shards_are_known", ranks=2, timeout_s=JOB_S) == [True, True]


def shards_are_known(rank: int) -> bool:
    """Shard a layer over the ranks, and look at it before and after."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer = nn.Linear(4, 4)
    assert not is_fsdp_module(layer) and not is_dtensor(layer.weight)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return is_fsdp_module(layer) and is_dtensor(layer.weight)
