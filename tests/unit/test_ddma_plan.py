"""The weight plan against full tensors: any trainer to any generators, every byte where it belongs,
once, and the work shared.
"""

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

from llamarl.ddma.layout import Destination, Parameter, Source, buffer_of, parameters_to_send
from llamarl.ddma.payload import Copier, Target, buckets_of
from llamarl.ddma.plan import make_plan
from llamarl.models.config import ModelConfig
from llamarl.models.sharding import (
    SCALE,
    Box,
    heads_of,
    num_parameters,
    parameter_shapes,
    tensor_parallel_box,
)

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "GPTNeoXForCausalLM",
    "GPT2LMHeadModel",
)
FP8, INT8 = torch.float8_e4m3fn, torch.int8
LLAMA_405B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=None,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    attention_bias=False,
)


def size_of_whole(p: Parameter) -> int:
    """Bytes of a global parameter."""
    return Box.whole(p.shape).numel * p.dtype.itemsize


def config_of(
    *,
    vocab=23,
    hidden=10,
    intermediate=14,
    layers=2,
    heads=6,
    kv=2,
    head_dim=4,
    tied=False,
    bias=False,
    architecture="LlamaForCausalLM",
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )


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
        full[p.name] = (
            numbers.view(-1, 1)
            .view(torch.uint8)[:, : p.dtype.itemsize]
            .reshape(*p.shape, p.dtype.itemsize)
            .clone()
        )
        at += count
    return full


def box_of(full: torch.Tensor, box: Box) -> torch.Tensor:
    """The bytes of a box of a stamped tensor [bytes] uint8."""
    return full[box.within(Box.whole(tuple(full.shape[:-1])))].reshape(-1)


# --- what a rank holds ---


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 5),
    fsdp=st.integers(1, 9),
    replicate=st.integers(1, 3),
    bias=st.booleans(),
)
def test_a_trainer_rank_holds_what_fsdp2_gives_it(rows, columns, fsdp, replicate, bias):
    shape = (rows,) if bias else (rows, columns)
    source, p = Source(fsdp, replicate), Parameter("model.norm.weight", shape, torch.float32)
    for rank in range(source.num_ranks):
        box = source.box(config_of(), p, rank)
        where = [rank // fsdp, rank % fsdp]
        lengths, offsets = torch_box(shape, (replicate, fsdp), where, [Replicate(), Shard(0)])
        assert box.lengths == tuple(lengths)
        assert not box.numel or box.offsets == tuple(offsets)


@given(
    units=st.integers(1, 5), columns=st.integers(1, 4), fsdp=st.integers(1, 5), tp=st.integers(1, 4)
)
def test_a_tensor_parallel_trainer_rank_holds_what_fsdp2_gives_it(units, columns, fsdp, tp):
    source, config = (
        Source(fsdp, tp=tp),
        config_of(intermediate=units * tp, hidden=columns, heads=tp),
    )
    by_rows = Parameter("model.layers.0.mlp.up_proj.weight", (units * tp, columns), torch.float32)
    by_columns = Parameter(
        "model.layers.0.mlp.down_proj.weight", (columns, units * tp), torch.float32
    )
    for rank in range(source.num_ranks):
        where = list(divmod(rank, tp))
        box = source.box(config, by_columns, rank)
        lengths, offsets = torch_box(by_columns.shape, (fsdp, tp), where, [Shard(0), Shard(1)])
        assert box.lengths == tuple(lengths) and (not box.numel or box.offsets == tuple(offsets))
        box = source.box(config, by_rows, rank)
        lengths, offsets = torch_box(
            by_rows.shape, (fsdp, tp), where, [_StridedShard(0, split_factor=tp), Shard(0)]
        )
        assert box.lengths == tuple(lengths) and (not box.numel or box.offsets == tuple(offsets))


@given(per_kv=st.integers(1, 5), kv=st.integers(1, 6), size=st.integers(1, 8))
def test_every_query_head_is_on_one_rank_with_the_key_value_head_that_it_reads(per_kv, kv, size):
    config = config_of(heads=per_kv * kv, kv=kv)
    if size > per_kv * kv:
        with pytest.raises(
            ValueError, match=f"tensor_parallel={size}: the model has {per_kv * kv} query heads"
        ):
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


def test_two_ranks_hold_these_parts_by_hand():
    # 6 query heads of 4, two key/value heads; 3 ranks: queries 0-1, 2-3, 4-5 read key/value heads
    # 0, 0-1, 1.
    config, shapes = config_of(), parameter_shapes(config_of())

    def rows(part, rank, dim=0):
        name = next(n for n in shapes if part in n)
        box = tensor_parallel_box(config, name, shapes[name], rank, 3)
        return box.offsets[dim], box.lengths[dim]

    assert [rows("q_proj", r) for r in range(3)] == [(0, 8), (8, 8), (16, 8)]
    assert [rows("k_proj", r) for r in range(3)] == [(0, 4), (0, 8), (4, 4)]
    assert [rows("o_proj", r, dim=1) for r in range(3)] == [(0, 8), (8, 8), (16, 8)]
    assert [rows("gate_proj", r) for r in range(3)] == [(0, 4), (4, 5), (9, 5)]
    assert [rows("down_proj", r, dim=1) for r in range(3)] == [(0, 4), (4, 5), (9, 5)]
    assert [rows("embed_tokens", r) for r in range(3)] == [(0, 7), (7, 8), (15, 8)]
    assert [rows("input_layernorm", r) for r in range(3)] == [(0, 10)] * 3


# -- the plan against full tensors


@st.composite
def topologies(draw):
    """(config, parameters, source, destination, feed, fuse, limit of a bucket)"""
    tp = draw(st.sampled_from([1, 1, 2, 3]))
    per_kv, kv = draw(st.integers(1, 3)), draw(st.integers(1, 3)) * tp
    config = config_of(
        architecture=draw(st.sampled_from(ARCHITECTURES)),
        vocab=draw(st.integers(2, 30)),
        hidden=draw(st.integers(1, 12)),
        intermediate=draw(st.integers(1, 6)) * tp,
        layers=draw(st.integers(1, 2)),
        heads=per_kv * kv,
        kv=kv,
        head_dim=2 * draw(st.integers(1, 3)),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
    )
    quantized = draw(st.sampled_from([None, None, FP8, INT8]))
    keep = (
        draw(st.sampled_from([(), ("down_proj",), ("k_proj",), ("layers.0.",)]))
        if quantized
        else ()
    )
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    source = Source(draw(st.integers(1, 4)), draw(st.integers(1, 3)), tp)
    destination = Destination(
        draw(st.integers(1, min(4, per_kv * kv))),
        draw(st.integers(1, 4)),
        fsdp=draw(st.sampled_from([1, 1, 2, 3])),
        split_vocabulary=draw(st.booleans()),
    )
    parameters = parameters_to_send(config, dtype, quantized, keep)
    # A rank that holds nothing is refused where it binds.
    assume(make_plan(config, parameters, source, destination).shard_bytes.all())
    return (
        config,
        parameters,
        source,
        destination,
        draw(st.sampled_from(["direct", "chain", "auto"])),
        draw(st.booleans()),
        draw(st.sampled_from([32, 100, 512, 1 << 20])),
    )


def carry(buckets, payload: torch.Tensor, of, buffer: torch.Tensor, writes: torch.Tensor) -> None:
    """By index arithmetic of this test's own: the bytes of every move to where its box lies in the
    receiver's buffer.
    """
    for region in chain.from_iterable(bucket.regions for bucket in buckets):
        p, held = region.parameter, of.held[region.name]
        index = (
            np.arange(held.box.numel)
            .reshape(held.box.lengths)[region.box.within(held.box)]
            .reshape(-1, 1)
        )
        where = torch.from_numpy(
            (held.start + index * p.dtype.itemsize + np.arange(p.dtype.itemsize)).reshape(-1)
        )
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
    config = plan.config
    parameters = plan.parameters
    source = plan.source
    destination = plan.destination
    full = stamps(parameters)
    carried = 0
    buffers = []
    for d in range(destination.num_ranks):
        part = d % destination.parts
        of = buffer_of(config, parameters, destination, part, fuse=fuse)
        buffer, writes = (
            torch.zeros(of.num_bytes, dtype=torch.uint8),
            torch.zeros(of.num_bytes, dtype=torch.int32),
        )
        feeders, upstream = plan.feeders(d)
        assert bool(feeders) == (upstream is None)
        for s in feeders:
            regions = plan.regions(s, part)
            for region in regions:  # a sender sends what it holds
                assert_within(region.box, source.box(config, region.parameter, s))
            assert sum(region.num_bytes for region in regions) == plan.bytes_to[s, part]
            buckets = buckets_of(regions, limit)
            carry(buckets, payload_of(buckets, full), of, buffer, writes)
        if upstream is not None:
            assert plan.follower(upstream) == d and upstream < d
            assert upstream % destination.parts == part
            carry(buckets_of(of.held.values(), limit), buffers[upstream], of, buffer, writes)
        inside = torch.zeros(of.num_bytes, dtype=torch.int32)
        for name, held in of.held.items():
            own = part_of(config, held.parameter, destination, part)
            assert held.box.lengths == own.lengths and (held.box == own or not own.numel)
            assert torch.equal(
                buffer[held.start : held.start + held.num_bytes], box_of(full[name], own)
            ), (name, d)
            inside[held.start : held.start + held.num_bytes] += 1
        assert (
            torch.equal(writes, inside) and int(inside.max()) <= 1
        )  # once, and nothing lies on anything else
        assert of.held.keys() == full.keys()
        carried += int(writes.sum())
        buffers.append(buffer)
    assert carried == plan.num_bytes


@settings(max_examples=40)
@given(topologies())
def test_every_byte_arrives_once_where_the_full_tensor_says(topology):
    config, parameters, source, destination, feed, fuse, limit = topology
    assert_delivers(make_plan(config, parameters, source, destination, feed=feed), fuse, limit)


@settings(max_examples=60)
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
    config = config_of(heads=per_kv * kv, kv=kv, intermediate=intermediate, layers=1)
    assume(max(tp, to) <= per_kv * kv)
    try:
        plan = make_plan(
            config,
            parameters_to_send(config, torch.float32),
            Source(fsdp, replicate, tp),
            Destination(to),
        )
    except ValueError:
        assert kv % tp or intermediate < tp
        return
    assert_delivers(plan)


def assert_within(box: Box, outer: Box) -> None:
    for a, n, o, m in zip(box.offsets, box.lengths, outer.offsets, outer.lengths):
        assert o <= a and a + n <= o + m and n > 0


@settings(max_examples=50)
@given(topologies())
def test_every_generator_has_one_feed_and_each_forwards_at_most_once(topology):
    config, parameters, source, destination, feed, *_ = topology
    plan = make_plan(config, parameters, source, destination, feed=feed)
    followed = [plan.follower(d) for d in range(destination.num_ranks)]
    for d in range(destination.num_ranks):
        feeders, upstream = plan.feeders(d)
        assert [u for u, after in enumerate(followed) if after == d] == (
            [] if upstream is None else [upstream]
        )
        replica = d // destination.parts
        for s in range(source.num_ranks):
            sends = replica in plan.feeds(s) and bool(plan.regions(s, d % destination.parts))
            assert sends == (s in feeders)
    if feed == "direct":
        assert plan.roots == destination.replicas and followed == [None] * destination.num_ranks
    if feed == "chain":
        assert plan.roots == 1


@settings(max_examples=30)
@given(topologies())
def test_the_copies_of_a_receiver_are_those_of_the_index_arithmetic(topology):
    """Target writes strided boxes, or lets a bucket be received in its place; the bytes must be
    where `carry` puts them, digest included.
    """
    config, parameters, source, destination, feed, fuse, limit = topology
    plan, full = (
        make_plan(config, parameters, source, destination, feed="direct"),
        stamps(parameters),
    )
    for part in range(destination.parts):
        of = buffer_of(config, parameters, destination, part, fuse=fuse)
        want, got = (
            torch.zeros(of.num_bytes, dtype=torch.uint8),
            torch.zeros(of.num_bytes, dtype=torch.uint8),
        )
        for s in plan.feeders(part)[0]:
            buckets = buckets_of(plan.regions(s, part), limit)
            payload = payload_of(buckets, full)
            carry(buckets, payload, of, want, torch.zeros(of.num_bytes, dtype=torch.int32))
            for bucket in buckets:
                target, source = Target(bucket, of, got), payload[bucket.start : bucket.end]
                if target.in_place is not None and s % 2:
                    source = target.in_place.copy_(source)
                digest = Copier("xxh3").copy_parts(source, target.parts)
                assert digest == bucket.digest(payload, Copier("xxh3"))
        assert torch.equal(got, want)


@settings(max_examples=50)
@given(topologies())
def test_a_fused_tensor_is_its_members_end_to_end(topology):
    config, parameters, _, destination, *_ = topology
    full = stamps(parameters)
    dtypes = {p.name: p.dtype for p in parameters}
    for part in range(destination.parts):
        of = buffer_of(config, parameters, destination, part, fuse=True)
        buffer = torch.zeros(of.num_bytes, dtype=torch.uint8)
        for name, held in of.held.items():
            buffer[held.start : held.start + held.num_bytes] = box_of(full[name], held.box)
        for members in of.fused.values():
            assert len({dtypes[m] for m in members}) == 1, "a tensor has one dtype"
            first, size = of.held[members[0]].start, sum(of.held[m].num_bytes for m in members)
            assert torch.equal(
                buffer[first : first + size],
                torch.cat([box_of(full[m], of.held[m].box) for m in members]),
            )
        assert not buffer_of(config, parameters, destination, part).fused


def test_attention_and_mlp_are_what_fuses():
    config = config_of(layers=1, bias=True)
    fused = buffer_of(
        config, parameters_to_send(config, torch.bfloat16, FP8), Destination(), 0, fuse=True
    ).fused
    layer = "model.layers.0"
    for end in ("weight", "weight_scale", "bias"):
        assert fused[f"{layer}.self_attn.qkv_proj.{end}"] == tuple(
            f"{layer}.self_attn.{x}_proj.{end}" for x in "qkv"
        )
    for end in ("weight", "weight_scale"):
        assert fused[f"{layer}.mlp.gate_up_proj.{end}"] == tuple(
            f"{layer}.mlp.{x}_proj.{end}" for x in ("gate", "up")
        )
    assert len(fused) == 5


def test_quantised_weights_travel_as_a_byte_and_a_scale_a_row():
    config = config_of(layers=1, bias=True)
    parameters = {
        p.name: p
        for p in parameters_to_send(config, torch.bfloat16, FP8, exclude=("down_proj", "lm_head"))
    }
    assert parameters["model.layers.0.self_attn.q_proj.weight"] == Parameter(
        "model.layers.0.self_attn.q_proj.weight", (24, 10), FP8
    )
    scale = "model.layers.0.self_attn.q_proj.weight_scale"
    assert parameters[scale] == Parameter(scale, (24,), torch.float32)
    kept = {n for n, p in parameters.items() if p.dtype == torch.bfloat16}
    assert (
        "model.layers.0.mlp.down_proj.weight" in kept
        and "model.layers.0.mlp.down_proj.weight_scale" not in parameters
    )
    assert {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
    } <= kept
    o_proj = parameters["model.layers.0.self_attn.o_proj.weight_scale"]
    assert Destination(tp=2).box(config, o_proj, 1) == Box(
        (0,), (10,)
    )  # all rows of what is split by columns


# --- sharing the work ---


@settings(max_examples=40)
@given(
    fsdp=st.sampled_from([1, 2, 4]),
    replicate=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    to=st.sampled_from([1, 2]),
    replicas=st.integers(1, 4),
    feed=st.sampled_from(["direct", "chain", "auto"]),
)
def test_no_trainer_rank_sends_more_than_its_share(fsdp, replicate, tp, to, replicas, feed):
    config = config_of(
        vocab=1024, hidden=512, intermediate=1024, layers=3, heads=8, kv=8, head_dim=64
    )
    parameters = parameters_to_send(config, torch.float32)
    plan = make_plan(
        config, parameters, Source(fsdp, replicate, tp), Destination(to, replicas), feed=feed
    )
    sent = [int(plan.bytes_to[s].sum()) * len(plan.feeds(s)) for s in range(plan.source.num_ranks)]
    floor = int(plan.shard_bytes.sum()) * plan.roots / plan.source.num_ranks
    assert sum(sent) == int(plan.shard_bytes.sum()) * plan.roots
    assert max(sent) <= 1.01 * floor, (sent, floor)


def test_what_every_replica_of_the_trainer_holds_is_cut_between_them_or_dealt():
    config = config_of(
        vocab=1024, hidden=512, intermediate=1024, layers=1, heads=8, kv=8, head_dim=64
    )
    parameters = parameters_to_send(config, torch.float32)
    cut = make_plan(config, parameters, Source(1, 3), Destination(), feed="direct")
    names = []
    for rank in range(3):
        names.append({region.parameter.name for region in cut.regions(rank, 0)})
    assert all("model.layers.0.mlp.up_proj.weight" in n for n in names)  # each a third
    assert all("model.layers.0.input_layernorm.weight" in n for n in names)
    assert [cut.feeds(s) for s in range(3)] == [[0]] * 3
    dealt = make_plan(config, parameters, Source(1, 2), Destination(1, 4), feed="direct")
    assert [dealt.feeds(s) for s in range(2)] == [[0, 2], [1, 3]]
    assert dealt.bytes_to.sum(1).tolist() == [sum(map(size_of_whole, parameters))] * 2


def test_roots_are_as_many_as_the_trainers_links_can_feed():
    config = config_of()
    parameters = parameters_to_send(config, torch.float32)

    def roots(source, destination, feed="auto"):
        return make_plan(config, parameters, source, destination, feed=feed).roots

    assert roots(Source(1), Destination(1, 8)) == 1 and roots(Source(4), Destination(2, 8)) == 2
    assert roots(Source(4), Destination(2, 1)) == 1 and roots(Source(1), Destination(2, 3)) == 1
    assert (
        roots(Source(4), Destination(2, 8), "direct") == 8
        and roots(Source(4), Destination(2, 8), "chain") == 1
    )
    plan = make_plan(config, parameters, Source(4), Destination(2, 8))
    # Generator ranks by replica: 0 1 | 2 3 are fed by the trainer, 4 5 by 0 1, 6 7 by 2 3, and so
    # on.
    assert [plan.feeders(d)[1] for d in range(16)] == [None] * 4 + list(range(12))


# -- what cannot be, and what is large


class Forgetful(Source):
    """A trainer whose last rank has lost a row of a layer's parameter."""

    def box(self, config, p, rank):
        box = super().box(config, p, rank)
        lost = rank == self.num_ranks - 1 and "mlp.up_proj" in p.name
        return box.cut(0, 0, box.lengths[0] - 1) if lost else box


def test_a_gap_in_the_sources_is_an_error_in_bytes():
    config = config_of(layers=1)
    parameters = parameters_to_send(config, torch.bfloat16)
    make_plan(config, parameters, Source(2), Destination(2))
    # up_proj's last row, 10 numbers of 2 bytes, is wanted by the second rank alone
    with pytest.raises(
        ValueError, match=r"hold \[0, 20\] bytes less than generator ranks 0..1 need"
    ):
        make_plan(config, parameters, Forgetful(2), Destination(2))


def test_llama_405b_on_512_ranks_reaches_64_replicas_of_8():
    c = LLAMA_405B
    plan = make_plan(
        c, parameters_to_send(c, torch.bfloat16), Source(fsdp=512), Destination(tp=8, replicas=64)
    )
    attention = 2 * 16384 * 16384 + 2 * 1024 * 16384  # q and o; k and v with 8 heads of 128
    split = 126 * (attention + 3 * 16384 * 53248) + 2 * 128256 * 16384
    norms = (126 * 2 + 1) * 16384
    assert split + norms == num_parameters(c) == 405_853_388_800
    replica = 2 * (split + 8 * norms)  # bfloat16; every tensor-parallel rank holds the norms
    assert plan.num_bytes == replica * 64 and plan.shard_bytes.tolist() == [replica // 8] * 8
    assert plan.roots == 64
    assert plan.bytes_to.sum() == replica
    # 512 divides every matrix's rows but the vocabulary's, of which a rank holds 251 instead of
    # 250.5, twice.
    assert plan.bytes_to.sum(1).max() == replica / 512 + 2 * 0.5 * 16384 * 2
    assert sum(region.num_bytes for region in plan.regions(511, 7)) == plan.bytes_to[511, 7]
