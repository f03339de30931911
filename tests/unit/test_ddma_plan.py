"""The weight plan against full tensors: any trainer to any generators, every byte where it belongs,
once, and the work shared; what its command prints; and the digests of what arrives.
"""

import json
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_box
from torch.distributed.tensor.placement_types import _StridedShard

from llamarl.ddma.__main__ import main
from llamarl.ddma.layout import Destination, Parameter, Source, buffer_of, parameters_to_send
from llamarl.ddma.payload import Copier, Target, buckets_of, fold
from llamarl.ddma.plan import make_plan
from llamarl.models.config import ModelConfig, tiny_directory
from llamarl.models.sharding import (
    SCALE,
    Box,
    heads_of,
    num_parameters,
    parameter_shapes,
    tensor_parallel_box,
)
from tests.build.model_config import model_config

ARCHITECTURES = [f"{name}ForCausalLM" for name in ("Llama", "Qwen3")]
FP8, INT8 = torch.float8_e4m3fn, torch.int8
LLAMA_405B = model_config(
    vocab_size=128256,
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    head_dim=128,
)


def config_of(**changes) -> ModelConfig:
    sizes = {"hidden_size": 10, "intermediate_size": 14, "num_attention_heads": 6}
    return model_config(**sizes | changes)


# Wide enough for even shares.
WIDE = model_config(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
)


def size_of_whole(p: Parameter) -> int:
    """Bytes of a global parameter."""
    return Box.whole(p.shape).numel * p.dtype.itemsize


def stamps(parameters: list[Parameter]) -> dict[str, torch.Tensor]:
    """Every element of every global parameter in bytes of its own: [*shape, itemsize] uint8,
    distinct where itemsize allows it.
    """
    full, at = {}, 1
    for p in parameters:
        count = Box.whole(p.shape).numel
        # Multiplied by an odd number, so that the lowest byte changes from element to element and
        # from row to row.
        numbers = torch.arange(at, at + count, dtype=torch.int64) * 40503
        lowest = numbers.view(-1, 1).view(torch.uint8)[:, : p.dtype.itemsize]
        full[p.name] = lowest.reshape(*p.shape, p.dtype.itemsize).clone()
        at += count
    return full


def box_of(full: torch.Tensor, box: Box) -> torch.Tensor:
    """The bytes of a box of a stamped tensor [bytes] uint8."""
    return full[box.within(Box.whole(tuple(full.shape[:-1])))].reshape(-1)


# --- what a rank holds ---


def assert_is(box: Box, of_torch) -> None:
    lengths, offsets = of_torch
    assert box.lengths == tuple(lengths) and (not box.numel or box.offsets == tuple(offsets))


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 40)) | st.tuples(st.integers(1, 40), st.integers(1, 5)),
    fsdp=st.integers(1, 9),
    replicate=st.integers(1, 3),
)
def test_a_trainer_rank_holds_what_fsdp2_gives_it(shape, fsdp, replicate):
    source, p = Source(fsdp, replicate), Parameter("model.norm.weight", shape, torch.float32)
    for rank in range(source.num_ranks):
        where = [rank // fsdp, rank % fsdp]
        placed = torch_box(shape, (replicate, fsdp), where, [Replicate(), Shard(0)])
        assert_is(source.box(config_of(), p, rank), placed)


@settings(max_examples=40)
@given(
    units=st.integers(1, 5), columns=st.integers(1, 4), fsdp=st.integers(1, 5), tp=st.integers(1, 4)
)
def test_a_tensor_parallel_trainer_rank_holds_what_fsdp2_gives_it(units, columns, fsdp, tp):
    source = Source(fsdp, tp=tp)
    heads = {"num_attention_heads": tp, "num_key_value_heads": 1}
    config = config_of(intermediate_size=units * tp, hidden_size=columns, **heads)
    rows = (units * tp, columns)
    mlp = "model.layers.0.mlp"
    by_rows = Parameter(f"{mlp}.up_proj.weight", rows, torch.float32)
    by_columns = Parameter(f"{mlp}.down_proj.weight", rows[::-1], torch.float32)
    strided = [_StridedShard(0, split_factor=tp), Shard(0)]
    for rank in range(source.num_ranks):
        where = list(divmod(rank, tp))
        placed = torch_box(rows[::-1], (fsdp, tp), where, [Shard(0), Shard(1)])
        assert_is(source.box(config, by_columns, rank), placed)
        assert_is(source.box(config, by_rows, rank), torch_box(rows, (fsdp, tp), where, strided))


@given(per_kv=st.integers(1, 5), kv=st.integers(1, 6), size=st.integers(1, 8))
def test_every_query_head_is_on_one_rank_with_the_key_value_head_that_it_reads(per_kv, kv, size):
    config = config_of(num_attention_heads=per_kv * kv, num_key_value_heads=kv)
    if size > per_kv * kv:
        with pytest.raises(ValueError, match=f"tensor_parallel={size}: .* {per_kv * kv} query"):
            heads_of(config, 0, size)
        return
    seen = []
    for rank in range(size):
        heads = heads_of(config, rank, size)
        readers = Counter()
        for query in range(heads.first_query, heads.first_query + heads.num_query):
            readers[query // per_kv - heads.first_kv] += 1
            seen.append(query)
        assert dict(readers) == dict(enumerate(heads.readers))  # none that no query head reads
        assert heads.num_kv == len(readers)
        assert heads.uniform == (len(set(readers.values())) == 1)
    assert seen == list(range(per_kv * kv))


def test_three_ranks_hold_these_parts_by_hand():
    # 6 query heads of 4, two key/value heads; 3 ranks: queries 0-1, 2-3, 4-5 read key/value heads
    # 0, 0-1, 1.
    shapes = parameter_shapes(config_of())

    def parts(part, dim=0):
        name = next(n for n in shapes if part in n)
        boxes = [tensor_parallel_box(config_of(), name, shapes[name], r, 3) for r in range(3)]
        return [(box.offsets[dim], box.lengths[dim]) for box in boxes]

    assert parts("q_proj") == parts("o_proj", dim=1) == [(0, 8), (8, 8), (16, 8)]
    assert parts("k_proj") == [(0, 4), (0, 8), (4, 4)]
    assert parts("gate_proj") == parts("down_proj", dim=1) == [(0, 4), (4, 5), (9, 5)]
    assert parts("embed_tokens") == [(0, 7), (7, 8), (15, 8)]
    assert parts("input_layernorm") == [(0, 10)] * 3


# --- the plan against full tensors ---


@st.composite
def topologies(draw):
    """(plan, fuse, limit of a bucket)"""
    tp = draw(st.sampled_from([1, 1, 2, 3]))
    per_kv, kv = draw(st.integers(1, 3)), draw(st.integers(1, 3)) * tp
    config = config_of(
        architecture=draw(st.sampled_from(ARCHITECTURES)),
        vocab_size=draw(st.integers(2, 30)),
        hidden_size=draw(st.integers(1, 12)),
        intermediate_size=draw(st.integers(1, 6)) * tp,
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=per_kv * kv,
        num_key_value_heads=kv,
        head_dim=2 * draw(st.integers(1, 3)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
    )
    quantized = draw(st.sampled_from([None, None, FP8, INT8]))
    keep = draw(st.sampled_from([(), ("down_proj",), ("k_proj",), ("layers.0.",)]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    source = Source(draw(st.integers(1, 4)), draw(st.integers(1, 3)), tp)
    destination = Destination(
        draw(st.integers(1, min(4, per_kv * kv))),
        draw(st.integers(1, 4)),
        fsdp=draw(st.sampled_from([1, 1, 2, 3])),
        split_vocabulary=draw(st.booleans()),
    )
    parameters = parameters_to_send(config, dtype, quantized, keep)
    feed = draw(st.sampled_from(["direct", "chain", "auto"]))
    plan = make_plan(config, parameters, source, destination, feed=feed)
    assume(plan.shard_bytes.all())  # a rank that holds nothing is refused where it binds
    if feed != "auto":
        assert plan.roots == {"direct": destination.replicas, "chain": 1}[feed]
    return plan, draw(st.booleans()), draw(st.sampled_from([32, 100, 512, 1 << 20]))


def carry(buckets, payload: torch.Tensor, of, buffer: torch.Tensor, writes: torch.Tensor) -> None:
    """By index arithmetic of this test's own: the bytes of every move to where its box lies in the
    receiver's buffer.
    """
    for region in chain.from_iterable(bucket.regions for bucket in buckets):
        size, held = region.parameter.dtype.itemsize, of.held[region.name]
        places = np.arange(held.box.numel).reshape(held.box.lengths)
        index = places[region.box.within(held.box)].reshape(-1, 1)
        where = torch.from_numpy((held.start + index * size + np.arange(size)).reshape(-1))
        buffer[where] = payload[region.start : region.end]
        writes[where] += 1


def payload_of(buckets, full) -> torch.Tensor:
    """What a sender lays into its slot: boxes of the whole tensors."""
    flat = torch.full((buckets[-1].end,), 0xEE, dtype=torch.uint8)
    for region in chain.from_iterable(bucket.regions for bucket in buckets):
        flat[region.start : region.end] = box_of(full[region.name], region.box)
    return flat


def part_of(config, p: Parameter, destination: Destination, part: int) -> Box:
    """What a rank must hold: of its tensor-parallel part what torch says that FSDP2 gives it."""
    shard, t = divmod(part, destination.tp)
    name = p.name.removesuffix(SCALE)
    whole = tensor_parallel_box(
        config, name, p.shape, t, destination.tp, split_vocabulary=destination.split_vocabulary
    )
    lengths, offsets = torch_box(whole.lengths, (destination.fsdp,), [shard], [Shard(0)])
    return whole.cut(0, offsets[0], lengths[0])


def assert_delivers(plan, fuse=False, limit=1 << 20) -> None:
    """Carry all that the plan says, by hand, and compare every generator rank's buffer with the
    full tensors.
    """
    config, parameters = plan.config, plan.parameters
    source, destination = plan.source, plan.destination
    full = stamps(parameters)
    carried = 0
    buffers = []
    followed = []
    for d in range(destination.num_ranks):
        replica, part = divmod(d, destination.parts)
        of = buffer_of(config, parameters, destination, part, fuse=fuse)
        buffer = torch.zeros(of.num_bytes, dtype=torch.uint8)
        writes = torch.zeros(of.num_bytes, dtype=torch.int32)
        feeders, upstream = plan.feeders(d)
        assert bool(feeders) == (upstream is None)
        for s in range(source.num_ranks):
            sends = replica in plan.feeds(s) and bool(plan.regions(s, part))
            assert sends == (s in feeders)
        for s in feeders:
            regions = plan.regions(s, part)
            for region in regions:  # a sender sends what it holds
                assert_within(region.box, source.box(config, region.parameter, s))
            assert sum(region.num_bytes for region in regions) == plan.bytes_to[s, part]
            buckets = buckets_of(regions, limit)
            carry(buckets, payload_of(buckets, full), of, buffer, writes)
        if upstream is not None:
            followed.append(upstream)
            assert plan.follower(upstream) == d and upstream < d
            assert upstream % destination.parts == part
            carry(buckets_of(of.held.values(), limit), buffers[upstream], of, buffer, writes)
        inside = torch.zeros(of.num_bytes, dtype=torch.int32)
        for name, held in of.held.items():
            own = part_of(config, held.parameter, destination, part)
            assert held.box.lengths == own.lengths and (held.box == own or not own.numel)
            assert torch.equal(buffer[held.start : held.end], box_of(full[name], own)), (name, d)
            inside[held.start : held.end] += 1
        assert torch.equal(writes, inside) and int(inside.max()) <= 1, "once, and on nothing else"
        assert of.held.keys() == full.keys()
        for members in of.fused.values():
            lie = [of.held[member] for member in members]
            assert len({held.parameter.dtype for held in lie}) == 1, "a tensor has one dtype"
            assert [held.start for held in lie[1:]] == [held.end for held in lie[:-1]]
        assert fuse or not of.fused
        carried += int(writes.sum())
        buffers.append(buffer)
    assert carried == plan.num_bytes
    assert len(set(followed)) == len(followed), "each forwards at most once"
    assert sum(plan.follower(d) is not None for d in range(destination.num_ranks)) == len(followed)


def assert_within(box: Box, outer: Box) -> None:
    for a, n, o, m in zip(box.offsets, box.lengths, outer.offsets, outer.lengths):
        assert o <= a and a + n <= o + m and n > 0


@settings(max_examples=40)
@given(topologies())
def test_every_byte_arrives_once_where_the_full_tensor_says(topology):
    assert_delivers(*topology)


@settings(max_examples=30)
@given(
    per_kv=st.integers(1, 3),
    kv=st.integers(1, 6),
    intermediate=st.integers(1, 9),
    fsdp=st.integers(1, 3),
    replicate=st.integers(1, 2),
    tp=st.integers(2, 6),
    to=st.integers(1, 3),
)
def test_a_trainer_whose_tensor_parallel_parts_do_not_fit_is_refused_or_served_right(
    per_kv, kv, intermediate, fsdp, replicate, tp, to
):
    assume(max(tp, to) <= per_kv * kv)
    heads = {"num_attention_heads": per_kv * kv, "num_key_value_heads": kv}
    config = config_of(**heads, intermediate_size=intermediate, num_hidden_layers=1)
    parameters = parameters_to_send(config, torch.float32)
    try:
        plan = make_plan(config, parameters, Source(fsdp, replicate, tp), Destination(to))
    except ValueError:
        assert kv % tp or intermediate < tp
        return
    assert_delivers(plan)


@settings(max_examples=25)
@given(topologies())
def test_the_copies_of_a_receiver_are_those_of_the_index_arithmetic(topology):
    """Target writes strided boxes, or lets a bucket be received in its place; the bytes must be
    where `carry` puts them, digest included.
    """
    plan, fuse, limit = topology
    full = stamps(plan.parameters)
    copier = Copier("xxh3")
    for part in range(plan.destination.parts):
        of = buffer_of(plan.config, plan.parameters, plan.destination, part, fuse=fuse)
        want = torch.zeros(of.num_bytes, dtype=torch.uint8)
        got = torch.zeros_like(want)
        for s in plan.feeders(part)[0]:
            buckets = buckets_of(plan.regions(s, part), limit)
            payload = payload_of(buckets, full)
            carry(buckets, payload, of, want, torch.zeros(of.num_bytes, dtype=torch.int32))
            for bucket in buckets:
                target, source = Target(bucket, of, got), payload[bucket.start : bucket.end]
                if target.in_place is not None and s % 2:
                    source = target.in_place.copy_(source)
                digest = copier.copy_parts(source, target.parts)
                assert digest == bucket.digest(payload, copier)
        assert torch.equal(got, want)


def test_attention_and_mlp_are_what_fuses():
    config = config_of(num_hidden_layers=1, attention_bias=True)
    parameters = parameters_to_send(config, torch.bfloat16, FP8)
    fused = buffer_of(config, parameters, Destination(), 0, fuse=True).fused
    want = {}
    for module, members, ends in (
        ("self_attn.qkv", "q k v", "weight weight_scale bias"),
        ("mlp.gate_up", "gate up", "weight weight_scale"),
    ):
        whole = f"model.layers.0.{module}_proj"
        place = whole.rpartition(".")[0]
        for end in ends.split():
            parts = [f"{place}.{member}_proj.{end}" for member in members.split()]
            want[f"{whole}.{end}"] = tuple(parts)
    assert fused == want


def test_quantised_weights_travel_as_a_byte_and_a_scale_a_row():
    config = config_of(num_hidden_layers=1, attention_bias=True)
    sent = parameters_to_send(config, torch.bfloat16, FP8, exclude=("down_proj", "lm_head"))
    parameters = {p.name: p for p in sent}
    layer = "model.layers.0"
    q_proj = f"{layer}.self_attn.q_proj.weight"
    assert parameters[q_proj] == Parameter(q_proj, (24, 10), FP8)
    scale = f"{q_proj}_scale"
    assert parameters[scale] == Parameter(scale, (24,), torch.float32)
    kept = {n for n, p in parameters.items() if p.dtype == torch.bfloat16}
    down = f"{layer}.mlp.down_proj.weight"
    assert down in kept and f"{down}_scale" not in parameters
    assert {"lm_head.weight", "model.norm.weight", f"{layer}.self_attn.q_proj.bias"} <= kept
    o_proj = parameters[f"{layer}.self_attn.o_proj.weight_scale"]
    # All rows of what is split by columns.
    assert Destination(tp=2).box(config, o_proj, 1) == Box((0,), (10,))


# --- sharing the work ---


@settings(max_examples=20)
@given(
    fsdp=st.sampled_from([1, 2, 4]),
    replicate=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    to=st.sampled_from([1, 2]),
    replicas=st.integers(1, 4),
    feed=st.sampled_from(["direct", "chain", "auto"]),
)
def test_no_trainer_rank_sends_more_than_its_share(fsdp, replicate, tp, to, replicas, feed):
    parameters = parameters_to_send(WIDE, torch.float32)
    source = Source(fsdp, replicate, tp)
    plan = make_plan(WIDE, parameters, source, Destination(to, replicas), feed=feed)
    sent = [int(plan.bytes_to[s].sum()) * len(plan.feeds(s)) for s in range(source.num_ranks)]
    wanted = int(plan.shard_bytes.sum()) * plan.roots
    assert sum(sent) == wanted and max(sent) <= 1.01 * wanted / source.num_ranks


def test_what_every_replica_of_the_trainer_holds_is_cut_between_them_or_dealt():
    parameters = parameters_to_send(WIDE, torch.float32)
    cut = make_plan(WIDE, parameters, Source(1, 3), Destination(), feed="direct")
    for rank in range(3):  # each a third
        names = {region.parameter.name for region in cut.regions(rank, 0)}
        assert "model.layers.0.mlp.up_proj.weight" in names
        assert "model.layers.0.input_layernorm.weight" in names
    assert [cut.feeds(s) for s in range(3)] == [[0]] * 3
    dealt = make_plan(WIDE, parameters, Source(1, 2), Destination(1, 4), feed="direct")
    assert [dealt.feeds(s) for s in range(2)] == [[0, 2], [1, 3]]
    assert dealt.bytes_to.sum(1).tolist() == [sum(map(size_of_whole, parameters))] * 2


def test_roots_are_as_many_as_the_trainers_links_can_feed():
    parameters = parameters_to_send(config_of(), torch.float32)

    def planned(source, destination):
        return make_plan(config_of(), parameters, Source(source), Destination(*destination))

    cases = {(1, (1, 8)): 1, (4, (2, 8)): 2, (4, (2, 1)): 1, (1, (2, 3)): 1}
    assert {case: planned(*case).roots for case in cases} == cases
    # Generator ranks by replica: 0 1 | 2 3 are fed by the trainer, 4 5 by 0 1, 6 7 by 2 3, and so
    # on.
    upstream = [planned(4, (2, 8)).feeders(d)[1] for d in range(16)]
    assert upstream == [None] * 4 + list(range(12))


class Forgetful(Source):
    """A trainer whose last rank has lost a row of a layer's parameter."""

    def box(self, config, p, rank):
        box = super().box(config, p, rank)
        lost = rank == self.num_ranks - 1 and "mlp.up_proj" in p.name
        return box.cut(0, 0, box.lengths[0] - 1) if lost else box


def test_a_gap_in_the_sources_is_an_error_in_bytes():
    config = config_of(num_hidden_layers=1)
    parameters = parameters_to_send(config, torch.bfloat16)
    make_plan(config, parameters, Source(2), Destination(2))
    # up_proj's last row, 10 numbers of 2 bytes, is wanted by the second rank alone
    with pytest.raises(ValueError, match=r"hold \[0, 20\] bytes less than generator ranks 0..1"):
        make_plan(config, parameters, Forgetful(2), Destination(2))


def test_llama_405b_on_512_ranks_reaches_64_replicas_of_8():
    parameters = parameters_to_send(LLAMA_405B, torch.bfloat16)
    plan = make_plan(LLAMA_405B, parameters, Source(fsdp=512), Destination(tp=8, replicas=64))
    attention = 2 * 16384 * 16384 + 2 * 1024 * 16384  # q and o; k and v with 8 heads of 128
    split = 126 * (attention + 3 * 16384 * 53248) + 2 * 128256 * 16384
    norms = (126 * 2 + 1) * 16384
    assert split + norms == num_parameters(LLAMA_405B) == 405_853_388_800
    replica = 2 * (split + 8 * norms)  # bfloat16; every tensor-parallel rank holds the norms
    assert plan.num_bytes == replica * 64 and plan.shard_bytes.tolist() == [replica // 8] * 8
    assert plan.roots == 64
    assert plan.bytes_to.sum() == replica
    # 512 divides every matrix's rows but the vocabulary's, of which a rank holds 251 instead of
    # 250.5, twice.
    assert plan.bytes_to.sum(1).max() == replica / 512 + 2 * 0.5 * 16384 * 2
    assert sum(region.num_bytes for region in plan.regions(511, 7)) == plan.bytes_to[511, 7]


# --- the command ---

TINY = 1_633_728  # parameters


def planned(capsys, *arguments: str) -> dict:
    assert main(["plan", "--json", "--model", str(tiny_directory()), *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_shard_to_one_replica_is_the_model_once(capsys):
    got = planned(capsys, "--dtype", "float32")
    assert got["bytes_per_sync"] == got["floor"] == got["busiest"] == 4 * TINY
    assert got["links"] == [{"from": "trainer 0", "to": "generator 0", "bytes": 4 * TINY}]
    quantised = planned(capsys, "--dtype", "float8")["bytes_per_sync"]
    assert TINY < quantised < 0.6 * 2 * TINY, "a byte a number, and a scale a row"


def test_few_trainers_and_many_replicas_make_a_chain(capsys):
    topology = ("--source", "fsdp=2", "--destination", "replicas=6")
    got = planned(capsys, *topology)
    assert got["roots"] == 2 and got["feed"].startswith("chain")
    assert got["ratio"] == pytest.approx(1.0, abs=0.01)
    direct = planned(capsys, *topology, "--feed", "direct")
    assert direct["roots"] == 6 and direct["busiest"] == pytest.approx(3 * got["busiest"], rel=0.01)
    of_links = sum(link["bytes"] for link in got["links"])
    assert of_links == sum(got["sent"]) + sum(got["forwarded"]) == sum(got["received"])


def test_the_printed_plan_names_ranks_links_floor_and_reason(capsys):
    config = str(tiny_directory() / "config.json")  # no weights are needed
    topology = ("--source", "fsdp=2", "--destination", "tp=2,replicas=2")
    assert main(["plan", "--model", config, *topology]) == 0
    out = capsys.readouterr().out
    link = "trainer 0 -> generator 0"
    for part in (link, "chain: 1 of 2 replicas", "floor", "ratio", f"{TINY:,}"):
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


# --- digests and copies ---

METHODS = pytest.mark.parametrize("method", ["xxh3", "device"])  # the device's works on a CPU too
WORD = 1 << 64


def noise(size):
    numbers = torch.arange(size).mul_(2654435761).bitwise_right_shift_(7)
    return numbers.remainder_(251).to(torch.uint8)


@METHODS
@settings(max_examples=30)
@given(st.integers(1, 5 * 4096), st.data())
def test_a_digest_sees_any_changed_byte_and_swaps(method, size, data):
    def digest(flat):
        return Copier(method).digest_all([flat])

    flat = noise(size)
    before = digest(flat)
    assert -(2**63) <= before < 2**63
    i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    flat[i] ^= data.draw(st.integers(1, 255))
    assert digest(flat) != before != digest(noise(size)[:-1])
    flat = noise(size)
    if method == "xxh3" and flat[i] != flat[j]:
        flat[i], flat[j] = flat[j].item(), flat[i].item()
        assert digest(flat) != before


def test_folding_sees_the_order():
    assert fold([1, 2]) != fold([2, 1])
    assert fold([-1 % WORD]) == fold([-1]) == -1


def on_device_by_definition(data: bytes) -> int:
    """The sums of the words in each of 512 columns, weighted, and the bytes behind the last whole
    row (payload.py).
    """
    in_rows = len(data) // 4096 * 4096
    of_rows = 0
    for at in range(0, in_rows, 8):
        column = at // 8 % 512
        of_rows += int.from_bytes(data[at : at + 8], "little") * (2 * column + 1)
    of_tail = sum(byte * (2 * i + 257) for i, byte in enumerate(data[in_rows:]))
    return of_rows * 1000003 + of_tail + len(data)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 3 * 4096), st.integers(0, 70)), min_size=1, max_size=4))
def test_a_devices_digests_are_their_definition_however_many_are_taken_together(runs):
    whole = noise(4 * 4096)
    flats = [whole[first : first + size] for size, first in runs]
    by_hand = [on_device_by_definition(flat.numpy().tobytes()) for flat in flats]
    copier = Copier("device")
    assert copier.digest_all(flats) == fold(by_hand)
    assert copier.digest_all(flats[:1]) == fold(by_hand[:1])


def view_of(kind: str, dtype: torch.dtype, rows: int, width: int, first: int) -> torch.Tensor:
    """[rows, width] of zeros: whole, or a part of the columns of something wider; or [rows x
    width].
    """
    if kind == "flat":
        return torch.zeros(first + rows * width, dtype=dtype)[first:]
    if kind == "whole":
        return torch.zeros(rows, width, dtype=dtype)
    return torch.zeros(rows, width + first + 3, dtype=dtype)[:, first : first + width]


VIEWS = st.tuples(
    st.sampled_from(["flat", "whole", "columns"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    st.integers(1, 20),
    st.integers(1, 300),
    st.integers(0, 9),
)


@METHODS
@settings(max_examples=40)
@given(st.lists(VIEWS, min_size=1, max_size=5), st.integers(0, 20), st.booleans())
def test_parts_of_a_run_go_to_their_places_with_the_digests_that_their_sender_finds(
    method, kinds, gap, received_in_place
):
    copier = Copier(method)
    targets = [view_of(*kind) for kind in kinds]
    starts = []
    at = 0
    for target in targets:
        starts.append(-(-(at + gap) // 8) * 8)
        at = starts[-1] + target.nbytes
    source = noise(at)
    own = []  # the parts, where they lie in the source
    for start, t in zip(starts, targets):
        own.append(source[start : start + t.nbytes].view(t.dtype).view(t.shape))
    sent = [part.clone() for part in own]
    around = [t._base.clone() for t in targets if t._is_view()]
    places = own if received_in_place else targets
    found = copier.copy_parts(source, list(zip(starts, places)))
    assert found == copier.digest_all(sent) and torch.equal(source, noise(at))
    for place, part in zip(places, sent):
        assert torch.equal(place.contiguous().view(torch.uint8), part.view(torch.uint8))
    if not received_in_place:
        for target in targets:
            target.zero_()
    views = [t for t in targets if t._is_view()]
    assert all(torch.equal(t._base, before) for t, before in zip(views, around))
