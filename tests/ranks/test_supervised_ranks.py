"""Supervised steps and evaluations of two ranks under FSDP2 are those of one process, however
unevenly the rows are shared.

Each rank leaves what it computed in a safetensors file.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from llamarl.learning.sft import NextToken, SFTPair
from llamarl.learning.supervised import SupervisedSettings, SupervisedUpdate
from tests.ranks.sharded import FLOAT32, decoder_of, sharded_decoder, whole

pytestmark = pytest.mark.machine

RANKS = 2
DEADLINE_S = 120
SETTINGS = SupervisedSettings(
    lr=0.5,
    schedule="constant",
    warmup_steps=0,
    max_steps=2,
    microbatch_tokens=12,  # one row
    max_grad_norm=0.01,
)
# Which of the rows each rank has, of a step: as many as the other, fewer, none.
SHARES = {"even": ([0, 1], [2, 3]), "fewer": ([0, 1, 2], [3]), "none": ([], [0, 1, 2, 3])}


def rows() -> list[SFTPair]:
    """Four rows of 8 to 11 tokens, of which the last few are learned."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for size, learned in ((8, 3), (11, 7), (9, 1), (10, 5)):
        ids = torch.randint(0, 23, (size,), generator=draw)
        made.append(SFTPair(ids, torch.arange(size) >= size - learned))
    return made


def learn(decoder, shares: list[list[SFTPair]], group) -> dict[str, torch.Tensor]:
    """Two steps on these rows and an evaluation of them: the columns, and the weights."""
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.5)
    update = SupervisedUpdate(
        decoder, optimizer, NextToken(), SETTINGS, group=group, device=torch.device("cpu")
    )
    out = {}
    for step in range(2):
        columns = update.run(shares, step)
        out |= {f"step{step}/{name}": value for name, value in columns.items()}
    out |= update.evaluate(shares)
    tensors = {name: torch.tensor(float(value)) for name, value in out.items()}
    for name, parameter in decoder.named_parameters():
        tensors[f"weight/{name}"] = whole(parameter.detach()).clone()
    return tensors


def compute_on_ranks(rank: int, directory: str) -> None:
    """What one rank of the pool runs."""
    out = {}
    made = rows()
    for kind, shares in SHARES.items():
        own = [made[number] for number in shares[rank]]
        learned = learn(sharded_decoder("tied"), own, dist.group.WORLD)
        out |= {f"{kind}/{name}": value.contiguous() for name, value in learned.items()}
    save_file(out, Path(directory) / f"rank{rank}.safetensors")


@pytest.fixture(scope="module")
def ranks(pool, tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    """What each rank computed."""
    directory = tmp_path_factory.mktemp("ranks")
    pool.call(
        __file__, "compute_on_ranks", ranks=RANKS, timeout_s=DEADLINE_S, directory=str(directory)
    )
    return [load_file(directory / f"rank{rank}.safetensors") for rank in range(RANKS)]


@pytest.mark.parametrize("kind", SHARES)
def test_ranks_with_unequal_numbers_of_microbatches_learn_what_one_process_does(ranks, kind):
    one = learn(decoder_of(True), rows(), None)
    assert one["step0/targets/trained"] == 16 and one["step0/grad_norm"] > SETTINGS.max_grad_norm
    for rank in ranks:
        got = {name for name in rank if name.startswith(f"{kind}/")}
        assert got == {f"{kind}/{name}" for name in one}
        for name, want in one.items():
            if name.endswith("packing/padding_fraction"):
                continue  # each rank fills its own microbatches
            torch.testing.assert_close(
                rank[f"{kind}/{name}"],
                want,
                atol=2 * FLOAT32,
                rtol=4 * FLOAT32,
                msg=lambda m: f"{name}: {m}",
            )
    start = decoder_of(True).state_dict()
    moved = [(one[f"weight/{name}"] - start[name]).abs().max().item() for name in start]
    assert max(moved) > 1e-3
