"""Pass rates of unseen prompts, predicted from the policy's states."""

import json

import pytest
import torch

from llamarl.learning.prompt_values import KEPT, PromptValues, prompt_states
from llamarl.models.build import build_decoder
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.hf import load_weights
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.sampler import DifficultySampler
from llamarl.types import Verdict


def verdict(solved, of=4):
    return Verdict(of, float(solved), teaches=0 < solved < of, solved=float(solved))


def sampler(num_prompts=8):
    return DifficultySampler(num_prompts=num_prompts, group_size=4, seed=3, half_life=2.0)


def test_a_head_is_ridge_regression_on_states():
    values = PromptValues()
    assert values.predict(torch.ones(2, 3)) == []
    states = torch.tensor([[0.0, 2.0], [2.0, 0.0], [0.0, 0.0], [2.0, 2.0]])
    solved = [0.0, 1.0, 0.5, 0.5]
    values.learn(states, solved)
    # Centred at 1 with deviation 1: x = (-1, 1), (1, -1), ... and y - mean = -1/2, 1/2, 0, 0.
    # w = (X^T X + 2 I)^-1 X^T y = (1, -1) / 6, since X^T X = 4 I and D lambda = 2.
    expected = [0.5 - 1 / 3, 0.5 + 1 / 3, 0.5, 0.5]
    assert values.predict(states) == pytest.approx(expected)
    # Far away it does not leave the rates that there are.
    assert values.predict(torch.tensor([[99.0, -99.0]])) == pytest.approx([0.98])


def test_a_head_knows_the_newest_groups_and_goes_on_from_its_state():
    values = PromptValues()
    values.learn(torch.zeros(KEPT, 2), [0.0] * KEPT)
    values.learn(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), [1.0, 0.0])
    assert values.state_dict()["prompt_values/states"].shape == (KEPT, 2)
    again = PromptValues()
    again.load_state_dict({})
    again.load_state_dict(values.state_dict())
    asked = torch.tensor([[1.0, 0.5]])
    assert again.predict(asked) == values.predict(asked)


def test_states_are_those_of_each_prompt_alone_however_many_are_read_at_once():
    decoder = load_weights(build_decoder(read_config(tiny_directory())), tiny_directory())
    prompts = [torch.tensor([1, 7, 14, 8]), torch.tensor([1, 9]), torch.tensor([1, 7, 14])]
    device = torch.device("cpu")
    together = prompt_states(decoder, prompts, device, budget=100)
    apart = prompt_states(decoder, prompts, device, budget=1)
    assert together.shape == (3, decoder.config.hidden_size)
    torch.testing.assert_close(together, apart)
    assert not torch.equal(together[0], together[2])


def test_predicted_prompts_are_drawn_by_their_prediction_and_other_unseen_ones_are_not():
    ours = sampler()
    ours.learn(0, verdict(2))
    asked = ours.candidates(3)
    assert len(asked) == 3 and 0 not in asked
    ours.predicted({asked[0]: 0.5, asked[1]: 0.02, asked[2]: 0.98})
    chances = ours.chances().tolist()
    assert chances[asked[0]] > 2 * max(chances[asked[1]], chances[asked[2]])
    others = set(range(1, 8)) - set(asked)
    assert [chances[prompt] for prompt in others] == [0.0] * 4
    # What is seen counts by what was seen of it.
    ours.learn(asked[0], verdict(0))
    assert ours.chances()[asked[0]] < chances[asked[0]]
    again = sampler()
    again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    assert torch.equal(again.chances(), ours.chances())


def test_when_all_prompts_are_seen_nothing_is_to_be_predicted():
    ours = sampler(num_prompts=2)
    ours.learn(0, verdict(1))
    ours.learn(1, verdict(1))
    assert ours.candidates(5) == []


def test_news_are_what_came_of_ended_tickets_once_and_over_a_resume():
    def make():
        return TicketLedger(groups_per_step=2, max_lag=1, overcommit=0, sampler=sampler())

    ours = make()
    prompts = [ticket.prompt for ticket in ours.start(2, 0)]
    ours.finish([0, 1], {0: verdict(1), 1: verdict(2)})
    ours.take(0)
    assert ours.take_news() == []
    ours.trained(0.5)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    news = ours.take_news()
    assert news == [(prompts[0], verdict(1)), (prompts[1], verdict(2))]
    assert ours.take_news() == []
    assert resumed.take_news() == news
