"""Data sheets: written and read again they are the same, and what is wrong in one is named."""

from dataclasses import replace

import pytest
import yaml

from llamarl.models.config import read_config, tiny_directory
from llamarl.models.sharding import num_parameters
from llamarl.planner.costs import Costs
from llamarl.planner.curves import Cost, Curve, FitError
from llamarl.planner.memory import Memory
from llamarl.planner.plans import Experts, GeneratorPlan, Numerics, Plan, TrainerPlan, Work
from llamarl.planner.sheet import SHEETS, BadSheet, Measured, read_sheet, sheet_path, write_sheet

H100 = read_sheet("h100")
MODEL = read_config(tiny_directory())
MEASURED = Measured(
    model="tiny",
    parameters=num_parameters(MODEL),
    dtype="float32",
    microbatch=Cost(Curve((100, 200), (1.0, 2.0)), 1e-3, FitError(0.1, 0.2, 5), each=1e-5),
    update_s=0.5,
    decode=Cost(Curve((1, 4), (0.1, 0.2)), 1e-4),
    prefill=Curve((10, 20), (0.3, 0.4)),
    copy=Curve((1e6,), (0.01,)),
    score=Curve((1, 2), (0.5, 0.75)),
    turn_s=0.1,
    crowding=0.25,
)
SHEET = replace(H100, name="mine", measured=MEASURED, notes=("of a test",))
ONE = Plan(TrainerPlan(1, 1, 1, 200), GeneratorPlan(1, 1, 4))


def costs(sheet=SHEET, model=MODEL, **numbers):
    numerics = Numerics(**({"dtype": "float32", "compute_dtype": "float32"} | numbers))
    return Costs(sheet, model, numerics)


@pytest.mark.parametrize("sheet", [H100, SHEET], ids=["device", "measured"])
def test_a_sheet_is_read_as_it_was_written(tmp_path, sheet):
    file = tmp_path / "sheet.yaml"
    write_sheet(sheet, file)
    assert read_sheet(file) == sheet
    read = read_sheet(file).measured
    if read is not None:  # errors are not compared with curves
        assert read.microbatch.error == sheet.measured.microbatch.error


def test_every_sheet_that_comes_with_llamarl_is_read():
    assert [file.stem for file in SHEETS.glob("*.yaml")] == ["h100"]
    for file in SHEETS.glob("*.yaml"):
        assert read_sheet(file.stem).device.kind == "gpu"


def broken(tmp_path, *, of=SHEET, **changes):
    """A sheet's file with values changed at dotted places; None takes a key away."""
    file = tmp_path / "sheet.yaml"
    write_sheet(of, file)
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
        ({"device__memory_gb": 80}, "device.memory_gb: unknown key; did you mean memory_gib?"),
        ({"device__memory_gib": None}, "device.memory_gib: missing"),
        ({"device__memory_gib": -1}, "device.memory_gib=-1: need a finite number above 0"),
        ({"device__kind": "tpu"}, "device.kind=tpu: need one of gpu, cpu"),
        ({"device__gpus_per_node": 2.5}, "device.gpus_per_node=2.5: need a whole number"),
        ({"device__flops": {"bfloat61": 1.0}}, "did you mean bfloat16?"),
        ({"device__flops": {}}, "device.flops: need FLOP/s by dtype"),
        ({"assumptions__imbalance__value": 0.5}, "imbalance.value=0.5: need a finite number of"),
        ({"assumptions__imbalance__why": " "}, "imbalance.why: need the reason"),
        ({"assumptions__memory_share__value": 1.5}, "need a share of at most 1"),
        ({"assumptions__score_s": None}, "assumptions.score_s: missing"),
        ({"measured__dtype": "float33"}, "measured.dtype='float33': need one of"),
        ({"measured__prefill__ys": [2.0, 1.0]}, "measured.prefill: times [2.0, 1.0]"),
        ({"measured__prefill__xs": "no"}, "measured.prefill.xs: need a list"),
        ({"measured__microbatch__slope": -1}, "slope=-1: need a finite number of at least 0"),
        ({"notes": "one"}, "notes: need a list of texts"),
    ],
)
def test_what_is_wrong_in_a_sheet_is_named(tmp_path, changes, said):
    with pytest.raises(BadSheet) as error:
        read_sheet(broken(tmp_path, **changes))
    assert said in str(error.value)


def test_all_that_is_wrong_is_named_at_once(tmp_path):
    file = broken(tmp_path, device__kind="tpu", assumptions__imbalance__why="", notes=3)
    with pytest.raises(BadSheet) as error:
        read_sheet(file)
    assert len(str(error.value).splitlines()) == 4


def test_a_number_that_yaml_reads_as_a_text_is_a_number(tmp_path):
    sheet = read_sheet(broken(tmp_path, device__flops={"bfloat16": "989e12"}))
    assert sheet.device.flops == {"bfloat16": 989e12}
    with pytest.raises(BadSheet, match="no float8.*add device.flops.float8"):
        sheet.device.flops_of("float8")


def test_what_is_no_sheet_is_refused(tmp_path):
    with pytest.raises(BadSheet, match="did you mean h100"):
        sheet_path("h10")
    file = tmp_path / "a.yaml"
    file.write_text("a: [")
    with pytest.raises(BadSheet, match="not YAML"):
        read_sheet(file)
    file.write_text("- 1\n")
    with pytest.raises(BadSheet, match="need keys and values"):
        read_sheet(file)


# --- Seconds of a sheet ---


def test_what_was_measured_is_taken_as_it_is():
    timings = costs().timings(ONE)
    # Two microbatches of 200 tokens: 2 s each, and a millisecond a pair of 200 x 100 / 2, and what
    # each of 2 completions costs.
    assert timings.update_s(4, 400) == pytest.approx(2 * (2.0 + 1e-3 * 200 * 50 + 2e-5) + 0.5)
    assert timings.decode_s(4, 1000) == pytest.approx(0.2 + 0.1)
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


def test_experts_are_held_all_and_read_as_far_as_rows_see_them():
    """8 experts of which a token sees 2, so that the model's MLPs are 2 of them: 4 times as much is
    held, 1 of it read by one row, and 4 (1 - 0.75^3) = 2.3125 by three, whose experts overlap.
    """
    dense = costs(H100)
    sparse = Costs(H100, MODEL, dense.numerics, Experts(number=8, used=2))
    of_mlps = 3 * MODEL.hidden_size * MODEL.intermediate_size * MODEL.num_hidden_layers
    assert sparse.num_numbers == dense.num_numbers + 3 * of_mlps
    assert sparse.generator_bytes(1) == dense.generator_bytes(1) + 3 * 4 * of_mlps
    assert sparse.multiplied == dense.multiplied
    rate = 0.75 * 3.35e12
    assert sparse.decode_s(1, 0) == pytest.approx(dense.decode_s(1, 0))
    more = sparse.decode_s(3, 0) - dense.decode_s(3, 0)
    assert more == pytest.approx(1.3125 * 4 * of_mlps / rate)
    # What was measured was of the dense model.
    assert Costs(SHEET, MODEL, dense.numerics, Experts(8, 2)).decode_s(4, 0) != 0.2
    with pytest.raises(ValueError, match="used=9"):
        Experts(number=8, used=9)
    work = Work(4, 4, 10, 10, longest_prompt=16, max_new_tokens=16)
    with pytest.raises(ValueError, match="not counted for a mixture of experts"):
        Memory(sparse, work).trainer(TrainerPlan(1, 1, 1, 256))


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


@pytest.mark.parametrize("tokens", [1, 300, 5000])
def test_more_work_takes_no_less_time(tokens):
    for sheet in (H100, SHEET):
        found = costs(sheet)
        trainer = TrainerPlan(1, 1, 1, 200)
        assert found.update_s(1, 2 * tokens, trainer) >= found.update_s(1, tokens, trainer)
        assert found.decode_s(2, 2 * tokens) >= found.decode_s(1, tokens)
        assert found.prefill_s(2 * tokens) >= found.prefill_s(tokens)
