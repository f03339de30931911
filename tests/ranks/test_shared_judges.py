"""What gold and base say of an evaluation does not depend on how ranks share their models."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from llamarl.comm.together import Alone
from llamarl.evaluation.gold import Gold
from llamarl.evaluation.perplexity import Perplexity
from llamarl.executor import ExecutorGroup
from llamarl.models.config import read_config, tiny_directory
from llamarl.scoring.model import ModelScorer
from llamarl.scoring.scorer import Site
from llamarl.scoring.weighted import WeightedPart
from llamarl.tasks.parts import EvalSet
from tests.build.kind_settings import model_settings
from tests.evaluated import columns_of, evaluated, logprobs_by_transformers
from tests.ranks.topologies import TOPOLOGIES, alone, groups_on
from tests.scorers import SCORES, asked_for, transformers_scores, write_scorer
from tests.tolerances import of_logprobs

DEADLINE_S = 200
ASKED = asked_for(7, 2)  # of each the first completion is the answer, the other what gold compares
SETS = (EvalSet("", 0, 4), EvalSet("a", 4, 3))
MICROBATCH_TOKENS = 40
LOGIT = 8.0  # at most so large
MOST_TOKENS = 30  # of an answer
THREE = {"three": (1, 1)}  # copies, and ranks that share layers


def answers(which):
    """The first or the second completion of each prompt."""
    found = []
    for number, one in enumerate(ASKED):
        prompt_ids = tuple(one.prompt_ids.tolist())
        tokens = tuple(one.completions[which].tolist())
        text = f"{which} {number}"
        found.append(evaluated(text, prompt=number, prompt_ids=prompt_ids, tokens=tokens))
    return found


class Told(Alone):
    """On every rank, which all begin the same calls: what is asked comes as it does to another."""

    def call(self, name, value):
        call = self._calls[name]
        assert call.to_message is not None and call.from_message is not None
        return call.run(call.from_message(call.to_message(value)))


def judges_at(group: ExecutorGroup, path: str) -> list:
    site = Site(group, Told(), reproducible=True)
    scorer = model_settings(path, microbatch_tokens=MICROBATCH_TOKENS)
    gold = Gold(
        site,
        scorer=WeightedPart("gold", partial(ModelScorer, "gold", scorer)),
        references=[answer.item for answer in answers(1)],
    )
    sizes = {"dtype": "float32", "microbatch_tokens": MICROBATCH_TOKENS}
    return [gold, Perplexity(site, path=str(tiny_directory()), **sizes)]


def judged(rank: int, path: str, num_ranks: int, topologies: dict) -> dict[str, list]:
    """What one rank of the pool answers: columns, and how many elements it holds, by topology."""
    groups = {"whole": alone(rank), **groups_on(rank, topologies, num_ranks)}
    found = {}
    for name, group in groups.items():
        columns = {}
        held = 0
        for judge in judges_at(group, path):
            judge.load()
            judge.start()
            columns |= columns_of(judge, answers(0), sets=SETS)
            held += sum(tensor.numel() for tensor in judge.tensors())
        found[name] = [columns, held]
    return found


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("gold")
    return path, write_scorer(path)


def check(by_rank: list[dict], model: torch.nn.Module, topologies: dict) -> None:
    """All ranks that judge as one say alike, and what transformers say; so does each rank alone."""
    scores = transformers_scores(model, ASKED).view(-1, 2)
    greedy = [answer.item for answer in answers(0)]
    logprobs = logprobs_by_transformers(greedy)
    nats = of_logprobs(read_config(tiny_directory()), size=LOGIT)
    _, size = by_rank[0]["whole"]
    for one in SETS:
        own = slice(one.first, one.first + one.count)
        wanted = {
            "eval/gold": float(scores[own, 0].mean()),
            "eval/gold_references": float(scores[own, 1].mean()),
            "eval/win_rate": float((scores[own, 0] > scores[own, 1]).double().mean()),
        }
        num_tokens = sum(item.token_ids.numel() for item in greedy[own])
        perplexity = math.exp(-logprobs[own].sum() / num_tokens)
        for found in by_rank:
            for name in ("whole", *topologies):
                columns, _ = found[name]
                for column, value in one.columns(wanted).items():
                    assert columns[column] == pytest.approx(value, abs=SCORES), (name, column)
                (column,) = one.columns({"eval/perplexity": 0})
                assert columns[column] == pytest.approx(perplexity, rel=nats), name
    for found in by_rank:
        for name, (replicate, tp) in topologies.items():
            columns, held = found[name]
            assert columns == by_rank[0][name][0], name
            if tp == 1:
                assert held <= 1.05 * size * replicate / len(by_rank) + 200, name


@pytest.mark.machine
@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize(
    "num_ranks, topologies", [(3, THREE), pytest.param(4, TOPOLOGIES, marks=pytest.mark.slow)]
)
def test_every_topology_judges_as_one_rank_does(pool, scorer, num_ranks, topologies):
    path, model = scorer
    given = {"num_ranks": num_ranks, "path": str(path), "topologies": topologies}
    by_rank = pool.call(__file__, "judged", ranks=num_ranks, timeout_s=DEADLINE_S, **given)
    check(by_rank, model, topologies)
