"""PEFT's adapter directories in and out: what is written is read, by peft too where it is
installed, and what cannot be used is refused by name.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from llamarl.config.command_line import check_command_line
from llamarl.evaluation.model import find_model, words_of
from llamarl.inference import Engine
from llamarl.models.attention import PackedAttention
from llamarl.models.build import read_config
from llamarl.models.config import tiny_directory
from llamarl.models.loading import training_decoder
from llamarl.models.lora import adapters_of
from llamarl.models.peft import CONFIG, WEIGHTS, check_adapter, load_adapter, lora_in, save_adapter
from llamarl.models.shape import Lora
from llamarl.models.sharding import adapter_shapes
from tests.build.model_directory import change_json
from tests.tolerances import of_logprobs

LORA = Lora(rank=3, alpha=8.0, targets=("q_proj", "down_proj"))
CONFIG_OF = dataclasses.replace(read_config(tiny_directory()), lora=LORA)
TOKENS = torch.arange(3, 15)


@pytest.fixture
def adapters() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = adapter_shapes(CONFIG_OF).items()
    return {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in shapes}


@pytest.fixture
def directory(adapters, tmp_path):
    save_adapter(adapters, LORA, tiny_directory(), tmp_path / "adapter")
    return tmp_path / "adapter"


def test_its_config_has_fields_of_old_releases_alone(directory):
    """peft 0.6 takes no others."""
    fields = json.loads((directory / CONFIG).read_text())
    of_every_release = {"peft_type", "task_type", "base_model_name_or_path", "inference_mode"}
    assert fields.keys() <= of_every_release | {"r", "lora_alpha", "target_modules"}


def decoder_of(directory):
    device = torch.device("cpu")
    decoder = training_decoder(
        tiny_directory(), mesh=None, device=device, compute_dtype=torch.float32, lora=LORA
    )
    load_adapter(decoder, directory)
    return decoder


@torch.no_grad()
def logits_of(decoder) -> torch.Tensor:
    attention = PackedAttention(torch.tensor([0, len(TOKENS)]))
    return decoder(TOKENS, torch.arange(len(TOKENS)), attention)


def test_what_is_written_is_read_bit_for_bit(adapters, directory):
    in_order = dataclasses.replace(LORA, targets=tuple(sorted(LORA.targets)))
    assert lora_in(directory) == (in_order, str(tiny_directory()))
    for name, parameter in adapters_of(decoder_of(directory)):
        assert torch.equal(parameter, adapters[name])


def test_an_engine_samples_from_a_peft_directory(directory):
    engine = Engine.from_hf(
        tiny_directory(), dtype="float32", device="cpu", max_slots=2, max_len=64, adapter=directory
    )
    got = engine.score(TOKENS[:1], TOKENS[1:], 1.0)
    logprobs = logits_of(decoder_of(directory)).log_softmax(-1)
    want = logprobs[torch.arange(len(TOKENS) - 1), TOKENS[1:]]
    assert (got - want).abs().max() <= of_logprobs(CONFIG_OF, size=4.0)


def test_peft_computes_the_same_model(directory, monkeypatch):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    # peft refuses to look at a torchao older than its own, which nothing here needs of it.
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    base = AutoModelForCausalLM.from_pretrained(tiny_directory(), dtype=torch.float64)
    theirs = peft.PeftModel.from_pretrained(base, directory).double().eval()
    with torch.no_grad():
        want = theirs(TOKENS[None]).logits[0]
    got = logits_of(decoder_of(directory))
    assert (got - want).abs().max() <= of_logprobs(CONFIG_OF, size=float(want.std()))
    theirs.save_pretrained(directory.with_name("theirs"))
    ours = check_adapter(directory, CONFIG_OF)
    saved = check_adapter(directory.with_name("theirs"), CONFIG_OF)
    assert all(torch.equal(saved[name], value) for name, value in ours.items())


@pytest.mark.parametrize(
    "key, value",
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("peft_type", "IA3"),
        ("init_lora_weights", "pissa"),
        ("target_modules", "all-linear"),
        ("r", 0),
    ],
)
def test_what_is_not_supported_is_refused_by_name(directory, key, value):
    change_json(directory / CONFIG, **{key: value})
    with pytest.raises(ValueError, match=f"{CONFIG}: .*{key}="):
        check_adapter(directory, CONFIG_OF)


@pytest.mark.parametrize(
    "lora, said",
    [
        (Lora(4, 8.0, LORA.targets), "trainer.lora.rank=3"),
        (Lora(3, 3.0, LORA.targets), "trainer.lora.alpha=8.0"),
        (Lora(3, 8.0, ("q_proj",)), r"trainer.lora.targets=\[down_proj,q_proj\]"),
    ],
)
def test_other_settings_than_the_directorys_are_told_which_it_needs(directory, lora, said):
    with pytest.raises(ValueError, match=said):
        check_adapter(directory, dataclasses.replace(CONFIG_OF, lora=lora))


def test_tensors_that_do_not_fit_are_named(directory):
    weights = load_file(directory / WEIGHTS)
    first, second, third, *_ = weights
    weights[third][0, 0] = torch.nan
    save_file(weights, directory / WEIGHTS)
    with pytest.raises(ValueError, match="NaN"):
        check_adapter(directory, CONFIG_OF)
    weights[first] = weights[first][:, :-1].contiguous()
    weights["base_model.model.lm_head.weight"] = weights.pop(second)
    save_file(weights, directory / WEIGHTS)
    with pytest.raises(ValueError) as caught:
        check_adapter(directory, CONFIG_OF)
    for said in (f"{first}: shape", f"{second}: absent", "lm_head.weight: not in this"):
        assert said in str(caught.value)


def test_an_evaluation_of_a_peft_directory_takes_its_base(directory):
    path, run = find_model(directory)
    assert (path, run) == (directory, None)
    assert words_of(path) == [
        f"model.path='{tiny_directory()}'",
        f"trainer.lora.path='{directory}'",
        "trainer.lora.rank=3",
        "trainer.lora.alpha=8.0",
        "trainer.lora.targets=[down_proj,q_proj]",
    ]
    change_json(directory / CONFIG, base_model_name_or_path="someone/else")
    with pytest.raises(FileNotFoundError, match="base_model_name_or_path=someone/else"):
        words_of(path)


def test_a_directory_that_nothing_asks_for_is_refused(directory):
    with pytest.raises(ValueError, match="set trainer.lora.rank, trainer.lora.alpha"):
        check_command_line([f"trainer.lora.path={directory}"])
