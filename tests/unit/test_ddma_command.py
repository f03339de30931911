"""`python -m llamarl.ddma plan`: what it prints against hand arithmetic, and what it refuses."""

import json

import pytest

from llamarl.ddma.__main__ import main
from llamarl.models.config import tiny_directory

CONFIG_405B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
PARAMETERS_405B = 405_853_388_800  # as the model's card counts them


def plan(capsys, *arguments: str) -> dict:
    assert main(["plan", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_shard_to_one_replica_is_the_model_once(capsys):
    got = plan(capsys, "--model", str(tiny_directory()), "--dtype", "float32")
    assert (
        got["bytes_per_sync"] == 4 * 1_633_728 == got["floor"] == got["busiest"]
        and got["ratio"] == 1.0
    )
    assert got["links"] == [{"from": "trainer 0", "to": "generator 0", "bytes": 4 * 1_633_728}]


def test_the_largest_model_needs_only_its_config(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_405B))
    got = plan(
        capsys,
        "--model",
        str(tmp_path / "config.json"),
        "--source",
        "fsdp=512",
        "--destination",
        "tp=8,replicas=64",
    )
    norms = 2 * (253 * 16384) * 7  # whole on each of the eight ranks, not an eighth
    assert got["bytes_per_sync"] == 64 * (2 * PARAMETERS_405B + norms)
    assert got["feed"].startswith("direct") and 1.0 <= got["ratio"] < 1.001
    assert (
        sum(link["bytes"] for link in got["links"])
        == got["bytes_per_sync"]
        == sum(got["sent"])
        == sum(got["received"])
    )


def test_few_trainers_and_many_replicas_make_a_chain(capsys):
    got = plan(
        capsys,
        "--model",
        str(tiny_directory()),
        "--source",
        "fsdp=2",
        "--destination",
        "replicas=6",
    )
    assert (
        got["roots"] == 2
        and got["feed"].startswith("chain")
        and got["ratio"] == pytest.approx(1.0, abs=0.01)
    )
    direct = plan(
        capsys,
        "--model",
        str(tiny_directory()),
        "--source",
        "fsdp=2",
        "--destination",
        "replicas=6",
        "--feed",
        "direct",
    )
    assert direct["roots"] == 6 and direct["busiest"] == pytest.approx(3 * got["busiest"], rel=0.01)


def test_quantised_projections_travel_in_one_byte_and_a_scale_a_row(capsys):
    whole = plan(capsys, "--model", str(tiny_directory()))["bytes_per_sync"]
    got = plan(capsys, "--model", str(tiny_directory()), "--dtype", "float8")["bytes_per_sync"]
    assert whole / 2 < got < 0.6 * whole


def test_the_printed_plan_names_ranks_links_floor_and_reason(capsys):
    assert (
        main(
            [
                "plan",
                "--model",
                str(tiny_directory()),
                "--source",
                "fsdp=2",
                "--destination",
                "tp=2,replicas=2",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    for part in (
        "trainer 0 -> generator 0",
        "chain: 1 of 2 replicas",
        "floor",
        "ratio",
        "1,633,728 parameters",
    ):
        assert part in out, out


@pytest.mark.parametrize(
    "arguments, what",
    [
        (("--source", "fsdp=0"), "'fsdp=0': need fsdp=N,replicate=N,tp=N"),
        (("--destination", "tp=2,nodes=3"), "'nodes=3': need tp=N,replicas=N"),
        (("--model", "nowhere"), "nowhere: no such file"),
        (("--destination", "tp=99"), "tensor_parallel=99"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(capsys, arguments, what):
    assert main(["plan", "--model", str(tiny_directory()), *arguments]) == 2
    err = capsys.readouterr().err
    assert what in err and err.count("\n") == 1
