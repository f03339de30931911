"""Temperatures drawn a ticket: what a ticket is sampled at, on whichever rank and after a resume,
and what is compared with the trainer.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from executors.build import build_generator
from executors.build_trainer import build_trainer
from llamarl.config.command_line import compose_config
from llamarl.ddma.receiver import Staged
from llamarl.evaluation.ask import SAMPLED
from llamarl.inference import TemperatureRange
from llamarl.launch.placement import Placement
from llamarl.types import Completion
from tests.executors.generators import PROMPT, canary_of, generator, stored

LOW = 0.7
HIGH = 2.0
SEED = 11
DRAWN = TemperatureRange(LOW, HIGH, SEED)
TICKETS = 4


def test_it_is_uniform_and_a_function_of_seed_and_ticket_alone():
    temperatures = torch.tensor([DRAWN.of(ticket) for ticket in range(2000)])
    again = [TemperatureRange(LOW, HIGH, SEED).of(ticket) for ticket in reversed(range(2000))]
    assert again[::-1] == pytest.approx(temperatures.tolist(), abs=0.0, rel=1e-7)
    shares = (temperatures.double() - LOW) / (HIGH - LOW)
    assert 0 <= shares.min() and shares.max() < 1
    # Kolmogorov-Smirnov at one in a thousand.
    place = torch.arange(2000) / 2000
    farthest = (shares.sort().values - place).abs().max()
    assert farthest < 1.95 / math.sqrt(2000)
    other = TemperatureRange(LOW, HIGH, SEED + 1)
    assert all(other.of(ticket) != DRAWN.of(ticket) for ticket in range(9))


def begun(working=frozenset(), **options):
    """A generator that samples at drawn temperatures, and has tickets 0 to 3 or those of a
    checkpoint.
    """
    g = generator(new_tokens=8, least=8, temperatures=DRAWN, **options)
    g.tickets.working = working
    return g


def finished(g):
    """{(ticket, sample_index): completion} of all that is in work."""
    g.tickets.grants = 0
    while g.engine.num_live or g.engine.num_waiting or g._send_again:
        g.step()
    return {(c.ticket, c.sample_index): c for c in g.outputs.of(Completion)}


def sampled(**options):
    g = begun(**options)
    g.weights.arrive(0)
    g.tickets.grants = TICKETS
    g.step()
    return g


def test_logprobs_are_those_of_what_the_ticket_was_sampled_from():
    g = sampled()
    done = finished(g)
    assert len(done) == 2 * TICKETS
    for (ticket, _), completion in done.items():
        ids = completion.token_ids
        # Its end token is banned, as min_new_tokens says: the mass of the others alone.
        logprobs_LV = g.engine.score_all(PROMPT.prompt_ids, ids, DRAWN.of(ticket)).clone()
        logprobs_LV[:, 2] = -torch.inf
        expected = logprobs_LV.log_softmax(1).gather(1, ids[:, None]).squeeze(1)
        assert torch.allclose(completion.generator_logprobs, expected, atol=1e-4)
        elsewhere = g.engine.score_all(PROMPT.prompt_ids, ids, DRAWN.of(ticket) + 0.2)
        at_another = elsewhere.gather(1, ids[:, None]).squeeze(1)
        assert not torch.allclose(completion.generator_logprobs, at_another, atol=1e-3)


@pytest.mark.bitwise("a resumed completion is the one that was not stopped")
def test_partial_completions_go_on_at_their_tickets_temperature():
    whole = finished(sampled())
    first = sampled()
    part = stored(first.state_dict())
    assert sorted(part["in_work"]) == list(range(TICKETS)), "nothing has ended yet"
    g = begun(working=frozenset(part["in_work"]))
    g.tickets.grants = 0
    g.load_state_dict([part])
    g.weights.arrive(0)
    g.step()
    again = finished(g)
    assert again.keys() == whole.keys()
    for key, completion in again.items():
        assert completion.token_ids.tolist() == whole[key].token_ids.tolist()
        assert completion.generator_logprobs.tolist() == whole[key].generator_logprobs.tolist()


def test_held_out_prompts_and_the_canary_have_the_runs_temperature():
    g = generator(temperatures=DRAWN, eval_samples=1, temperature=1.0)
    submitted = []
    submit = g.engine.submit

    def noting(ticket, prompt_ids, params, *, stream=0):
        submitted.append((stream, ticket, params.temperature))
        submit(ticket, prompt_ids, params, stream=stream)

    g.engine.submit = noting
    # What the trainer says at 1: at any of the drawn ones it would differ.
    g.weights.staged = Staged(0, must_load=True, evaluate=True, canary=canary_of(0.0))
    g.step()
    assert {t for stream, _, t in submitted if stream == SAMPLED} == {1.0}
    assert [t for stream, _, t in submitted if stream == 0] == [DRAWN.of(0)]


def test_the_config_gives_the_range_to_the_generator_and_takes_the_comparison_from_the_trainer():
    inputs = SimpleNamespace(
        model_path="m",
        prompts=None,
        eval_prompts={},
        stop_token_ids=(2,),
        eval_due=None,
        decode=str,
        lora=None,
        fixed_prompts=[],
    )
    job = SimpleNamespace(
        inputs=inputs,
        files=SimpleNamespace(sample_maker=None),
        placement=Placement(compose_config([]), 1),
    )
    drawn = ["generator.temperature=[0.7,2]", "seed=11"]
    made = build_generator(compose_config(drawn), job)
    assert made.temperatures == DRAWN and made.sampling.temperature == 1.0
    assert build_generator(compose_config([]), job).temperatures is None
    compared = {
        word: build_trainer(compose_config([word]), job).settings.parity is not None
        for word in ("generator.temperature=[0.7,2]", "generator.temperature=[1,1]", "seed=1")
    }
    assert list(compared.values()) == [False, True, True]
