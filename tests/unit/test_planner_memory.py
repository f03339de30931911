"""The planner's bytes of a plan are those of a dry run of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llamarl.comm.groups import World
from llamarl.config.command_line import compose_config
from llamarl.launch.job import Job
from llamarl.launch.memory import prices
from llamarl.launch.run_directory import RunDirectory
from llamarl.memory import ATTENTION_KEYS, numbers_of_token
from llamarl.models.attention import SHORT
from llamarl.models.config import read_config, tiny_directory
from llamarl.planner.costs import Costs, GeneratorPlan, Numerics, StepWork, TrainerPlan
from llamarl.planner.predict import Predictor
from llamarl.planner.profile import read_profile

WORK = StepWork(
    groups=8,
    group_size=4,
    prompt_tokens=10,
    completion_tokens=20,
    longest_prompt=16,
    max_new_tokens=40,
)
WORDS = [
    "model.dtype=float32",
    "groups_per_step=8",
    "group_size=4",
    "max_new_tokens=40",
    "task.max_prompt_tokens=16",
    "eval.every=0",
]


def dry_run(ranks, *words):
    """name -> price, as a dry run of so many ranks has them."""
    config = compose_config([*WORDS, *words, "+dry_run=true", f"+ranks={ranks}"])
    world = World(0, 1, torch.device("cpu")).imagined(ranks)
    job = Job(config, world, RunDirectory(Path(), None))
    return {price.name: price for price in prices(job)}


def memory(numerics, **changes):
    model = replace(read_config(tiny_directory()), **changes)
    return Predictor(Costs(read_profile("h100"), model, numerics), WORK)


NUMBERS = Numerics(dtype="float32", compute_dtype="float32", on_cpu=True)


@pytest.mark.parametrize(
    "ranks, trainer, words",
    [
        (2, TrainerPlan(1, 1, 1, 1024), []),
        (8, TrainerPlan(2, 2, 1, 256), ["trainer.replicate=2"]),
        (8, TrainerPlan(2, 1, 2, 512), ["trainer.tensor_parallel=2"]),
    ],
)
@pytest.mark.parametrize("checkpointing, optimizer", [(False, "adamw8bit"), (True, "adamw")])
def test_a_trainer_takes_what_a_dry_run_says(ranks, trainer, words, checkpointing, optimizer):
    words = [
        *words,
        f"trainer.microbatch_tokens={trainer.microbatch_tokens}",
        f"trainer.activation_checkpointing={str(checkpointing).lower()}",
        f"trainer.optimizer={optimizer}",
        f"placement.trainer=[{','.join(map(str, range(trainer.gpus)))}]",
    ]
    price = dry_run(ranks, *words)["trainer"]
    numerics = replace(NUMBERS, checkpointing=checkpointing, optimizer=optimizer)
    found = memory(numerics).trainer_bytes(trainer)
    assert (found.held, found.working) == (price.held, price.working)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_generator_takes_what_a_dry_run_says(tensor, quantize):
    words = [
        "generator.max_slots=12",
        f"generator.tensor_parallel={tensor}",
        f"generator.quantize={quantize}",
        "placement.trainer=[0]",
        "placement.generator=[1,2]",
    ]
    price = dry_run(3, *words)["generator"]
    plan = GeneratorPlan(tensor, 2 // tensor, 12)
    found = memory(replace(NUMBERS, quantize=quantize)).generator_bytes(plan)
    assert (found.held, found.working) == (price.held, price.working)


def test_as_many_slots_as_fit_fit_and_one_more_does_not():
    priced = memory(NUMBERS)
    room = 64e6
    most = priced.most_slots(1, room)
    assert most > 0
    assert priced.generator_bytes(GeneratorPlan(1, 1, most)).total <= room
    assert priced.generator_bytes(GeneratorPlan(1, 1, most + 1)).total > room
    assert priced.most_slots(1, 1e6) <= 0


def test_a_key_head_that_several_ranks_need_is_held_by_each():
    """Of 2 key/value heads each of 4 ranks reads one: half of the cache, not a quarter."""
    model = replace(
        read_config(tiny_directory()), num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    whole = 2 * model.num_hidden_layers * 2 * 8
    assert [numbers_of_token(model, split) for split in (1, 2, 4)] == [
        whole,
        whole // 2,
        whole // 2,
    ]


def test_attention_weights_are_held_up_to_the_kernels_own_bounds():
    assert ATTENTION_KEYS[torch.bfloat16.itemsize] == max(SHORT.values())
    assert ATTENTION_KEYS[torch.float32.itemsize] == SHORT[torch.float32]
