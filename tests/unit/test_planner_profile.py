"""Hardware profiles: written and read again they are equal, and errors in one are named. The
planner's bytes of a plan are those of a dry run of it.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from llamarl.comm.groups import World
from llamarl.config.command_line import compose_config
from llamarl.launch.job import Job
from llamarl.launch.memory import prices
from llamarl.launch.run_directory import RunDirectory
from llamarl.memory import ATTENTION_KEYS, numbers_of_token
from llamarl.models.attention import SHORT
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.sharding import num_parameters
from llamarl.planner.costs import Costs, GeneratorPlan, Numerics, Split, StepWork, TrainerPlan
from llamarl.planner.predict import Predictor
from llamarl.planner.profile import (
    PROFILES,
    BadProfile,
    Curve,
    MeasuredTimes,
    profile_path,
    read_profile,
    write_profile,
)

H100 = read_profile("h100")
MODEL = read_config(tiny_directory())
MEASURED = MeasuredTimes(
    model="tiny",
    parameters=num_parameters(MODEL),
    dtype="float32",
    train=Curve((100, 200), (1.0, 2.0)),
    decode=Curve((1, 4), (0.1, 0.2)),
    prefill=Curve((10, 20), (0.3, 0.4)),
    copy=Curve((1e6,), (0.01,)),
    score=Curve((1, 2), (0.5, 0.75)),
)
PROFILE = replace(H100, name="mine", measured=MEASURED, notes=("of a test",))
ONE = Split(TrainerPlan(1, 1, 1, 200), GeneratorPlan(1, 1, 4))


def costs(profile=PROFILE, model=MODEL, **numbers):
    numerics = Numerics(**({"dtype": "float32", "compute_dtype": "float32"} | numbers))
    return Costs(profile, model, numerics)


@pytest.mark.parametrize("profile", [H100, PROFILE], ids=["device", "measured"])
def test_a_profile_is_read_as_it_was_written(tmp_path, profile):
    file = tmp_path / "profile.yaml"
    write_profile(profile, file)
    assert read_profile(file) == profile
    assert [file.stem for file in PROFILES.glob("*.yaml")] == ["h100"]  # all are read here


def broken(tmp_path, *, of=PROFILE, **changes):
    """A profile's file with values changed at dotted places; None takes a key away."""
    file = tmp_path / "profile.yaml"
    write_profile(of, file)
    values = yaml.safe_load(file.read_text())
    for place, value in changes.items():
        *above, last = place.split("__")
        section = values
        for key in above:
            section = section[key]
        if value is None:
            del section[last]
        else:
            section[last] = value
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"device__memory_gb": 80}, "device.memory_gb: unknown key; did you mean"),
        ({"device__memory_gib": None}, "device.memory_gib: missing"),
        ({"device__memory_gib": -1}, "device.memory_gib=-1: "),
        ({"device__memory_gib": float("inf")}, "device.memory_gib=inf: "),
        ({"device__kind": "tpu"}, "device: kind=tpu: need gpu or cpu"),
        ({"device__flops": {}}, "device.flops: need FLOP/s of one dtype at least"),
        ({"device__flops": {"bfloat61": 1.0}}, "flops.bfloat61: unknown key; did you mean"),
        ({"device__flops__bfloat16": -1}, "device.flops.bfloat16=-1: need a number above 0"),
        ({"assumptions__imbalance__value": 0.5}, "imbalance.value=0.5: need a number of at least"),
        ({"assumptions__imbalance__why": " "}, "assumptions.imbalance.why= : "),
        ({"assumptions__memory_share__value": 1.5}, "memory_share.value=1.5: need a share"),
        ({"assumptions__score_s": None}, "assumptions.score_s: missing"),
        ({"measured__prefill__ys": [2.0, 1.0]}, "measured.prefill: times [2.0, 1.0]: need times"),
        ({"measured__prefill__ys": [2.0]}, "measured.prefill: 2 sizes and 1 times: need as many"),
        ({"measured__prefill__xs": [2.0, 1.0]}, "measured.prefill: sizes [2.0, 1.0]: need rising"),
        ({"measured__prefill__xs": "no"}, "measured.prefill.xs=no: "),
    ],
)
def test_what_is_wrong_in_a_profile_is_named(tmp_path, changes, said):
    with pytest.raises(BadProfile) as error:
        read_profile(broken(tmp_path, **changes))
    assert said in str(error.value)


def test_all_that_is_wrong_is_named_at_once(tmp_path):
    with pytest.raises(BadProfile) as error:
        read_profile(broken(tmp_path, device__kind="tpu", assumptions__imbalance__why="", notes=3))
    assert len(str(error.value).splitlines()) == 4


def test_a_number_that_yaml_reads_as_a_text_is_a_number(tmp_path):
    profile = read_profile(broken(tmp_path, device__flops={"bfloat16": "989e12"}))
    assert profile.device.flops.stated == {"bfloat16": 989e12}
    with pytest.raises(BadProfile, match="no float8.*add device.flops.float8"):
        profile.device.flops_of("float8")


@pytest.mark.parametrize("text, said", [("a: [", "not YAML"), ("- 1\n", "need keys and values")])
def test_what_is_no_profile_is_refused(tmp_path, text, said):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(BadProfile, match=said):
        read_profile(tmp_path / "a.yaml")
    with pytest.raises(BadProfile, match="did you mean h100"):
        profile_path("h10")


# --- Curves ---


def test_a_time_below_that_of_a_smaller_size_is_raised_to_it():
    """Several times of a size count as their mean: 1, 4, (1 + 3) / 2 and 5."""
    curve = Curve.through([4, 1, 3, 2, 3], [5.0, 1.0, 1.0, 4.0, 3.0])
    assert (curve.xs, curve.ys) == ((1, 2, 3, 4), (1, 4, 4, 5))


def test_between_before_and_beyond_the_sizes_of_a_curve():
    curve = Curve((2, 4), (3.0, 5.0))
    assert curve.at(3) == 4.0
    assert curve.at(1) == 3.0
    assert curve.at(8) == 10.0
    assert curve.at(0) == 0.0
    assert curve.per_unit() == [(2, 1.5), (4, 1.25)]
    assert curve.unit_time_falls
    assert not Curve((1, 2), (1.0, 3.0)).unit_time_falls


# --- Seconds of a profile ---


def test_what_was_measured_is_taken_as_it_is():
    timings = costs().timings(ONE)
    assert timings.update_s(4, 400) == pytest.approx(2 * 2.0)  # two microbatches of 200 tokens
    assert timings.decode_s(4, 1000) == pytest.approx(0.2)
    assert timings.prefill_s(15) == pytest.approx(0.35)
    assert timings.score_s(2) == 0.75
    assert timings.swap_s == pytest.approx(0.01 * MEASURED.parameters * 4 / 1e6)
    assert timings.publish_s == timings.swap_s


def test_another_model_or_dtype_is_derived():
    other = replace(MODEL, num_hidden_layers=3 * MODEL.num_hidden_layers)
    assert costs(model=other).decode_s(4, 0) != 0.2
    assert costs(dtype="bfloat16").decode_s(4, 0) != 0.2
    assert costs(quantize="int8").decode_s(4, 0) != 0.2


def test_a_decode_step_reads_its_weights_by_hand():
    """One row without context: all weights once, at 75 % of the bandwidth, and 30 us a layer."""
    device = costs(H100)
    numbers = device.multiplied
    step_s = device.decode_s(1, 0)
    fixed = MODEL.num_hidden_layers * 3e-5
    assert step_s == pytest.approx(fixed + 4 * numbers / (0.75 * 3.35e12), rel=1e-6)


def test_a_microbatch_computes_its_flops_by_hand():
    """6 FLOPs a weight and token at 40 % of the peak; 8 where activations are made again."""
    for checkpointing, passes in ((False, 3), (True, 4)):
        device = costs(H100, checkpointing=checkpointing)
        seconds = device.microbatch_s(4096, 0, TrainerPlan(1, 1, 1, 4096))
        fixed = MODEL.num_hidden_layers * 4e-4 * passes / 3
        flops = 2 * passes * device.multiplied * 4096
        assert seconds == pytest.approx(fixed + flops / (0.4 * 6.7e13), rel=1e-6)


def test_messages_go_at_the_rate_of_what_joins_the_gpus():
    device = costs(H100)
    link = 4.5e11 * 0.7
    port = 5.0e10 * 0.7
    assert device.sum_s(1e9, 1) == 0.0
    assert device.sum_s(1e9, 8) == pytest.approx(2 * 7 / 8 * 1e9 / link + 1e-5)
    # Two nodes: the eight ports of a node together; one GPU of each of 16 nodes: a port.
    assert device.sum_s(1e9, 16) == pytest.approx(2 * 15 / 16 * 1e9 / (8 * port) + 1e-4)
    assert device.sum_s(1e9, 16, 8) == pytest.approx(2 * 15 / 16 * 1e9 / port + 1e-4)


def test_a_layer_on_two_gpus_takes_half_over_the_efficiency():
    one = costs().decode_s(4, 0)
    two = costs().decode_s(4, 0, tensor=2)
    sums = 2 * MODEL.num_hidden_layers * costs().sum_s(4 * MODEL.hidden_size * 4, 2)
    assert two == pytest.approx(one / (2 * 0.95) + sums)


@pytest.mark.parametrize("tokens", [1, 5000])
def test_more_work_takes_no_less_time(tokens):
    for profile in (H100, PROFILE):
        found = costs(profile)
        trainer = TrainerPlan(1, 1, 1, 200)
        assert found.update_s(1, 2 * tokens, trainer) >= found.update_s(1, tokens, trainer)
        assert found.decode_s(2, 2 * tokens) >= found.decode_s(1, tokens)
        assert found.prefill_s(2 * tokens) >= found.prefill_s(tokens)


# --- The bytes of a plan, and those of a dry run of it ---

WORK = StepWork(8, 4, 10, 20, longest_prompt=16, max_new_tokens=40)
WORDS = ["model.dtype=float32", "groups_per_step=8", "group_size=4", "max_new_tokens=40"]
WORDS += ["task.max_prompt_tokens=16", "eval.every=0"]


def dry_run(ranks, *words):
    """name -> price, as a dry run of so many ranks has them."""
    config = compose_config([*WORDS, *words, "+dry_run=true", f"+ranks={ranks}"])
    world = World(0, 1, torch.device("cpu")).imagined(ranks)
    return {one.name: one for one in prices(Job(config, world, RunDirectory(Path(), None)))}


def memory(numerics):
    return Predictor(Costs(H100, MODEL, numerics), WORK)


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
    model = replace(MODEL, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    whole = 2 * model.num_hidden_layers * 2 * 8
    assert [numbers_of_token(model, n) for n in (1, 2, 4)] == [whole, whole // 2, whole // 2]


def test_attention_weights_are_held_up_to_the_kernels_own_bounds():
    assert ATTENTION_KEYS[torch.bfloat16.itemsize] == max(SHORT.values())
    assert ATTENTION_KEYS[torch.float32.itemsize] == SHORT[torch.float32]
