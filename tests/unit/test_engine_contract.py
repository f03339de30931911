"""What llamarl/inference/protocol.py says of engines, held against each of them.

An engine that is added gets a function in tests/engines.py and a line in ENGINES.
"""

import inspect

import pytest
import torch

from llamarl.environments.engine import DialogueEngine
from llamarl.inference import Engine, SamplingParams
from llamarl.inference.protocol import (
    GenerationEngine,
    QuantizedEngine,
    ResumableEngine,
    StreamingEngine,
    TalkingEngine,
    can_resume,
    can_stream,
    can_talk,
)
from llamarl.inference.vllm_engine import VLLMEngine, vllm_problem
from tests import engines
from tests.decoding import by_place

NO_VLLM = vllm_problem() or ("" if engines.SMOLLM2 else "needs LLAMARL_SMOLLM2")
VLLM_MARKS = [pytest.mark.vllm, pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)]
ENGINES = [
    pytest.param(engines.native, id="native"),
    pytest.param(engines.dialogues, id="dialogues"),
    pytest.param(engines.vllm_over_stand_in, id="vllm over a stand-in"),
    pytest.param(engines.vllm, id="vllm", marks=VLLM_MARKS),
]
SLOTS, MAX_LEN = 4, 32
PROMPT = [4, 5, 6]


@pytest.fixture(params=ENGINES)
def engine(request, tmp_path, monkeypatch):
    """One with SLOTS slots, whose weights are of version 3."""
    made = request.param(tmp_path / "log", monkeypatch, max_slots=SLOTS, max_len=MAX_LEN)
    made.weights_changed(3)
    yield made
    made.close()


def finish(engine, chunk=2):
    """{(stream, ticket, sample_index): completion} of all that is at work."""
    while engine.num_live or engine.num_waiting:
        engine.step(chunk)
    found = engine.pop_finished()
    assert len(by_place(found)) == len(found), "a completion was handed out twice"
    return by_place(found)


def tokens_of(found):
    return {place: completion.token_ids.tolist() for place, completion in found.items()}


def params(new=6, **options):
    return SamplingParams(max_new_tokens=new, **options)


# --- the calls themselves ---


NATIVE = (GenerationEngine, ResumableEngine, QuantizedEngine, StreamingEngine)
PROTOCOLS = {Engine: NATIVE, DialogueEngine: (*NATIVE, TalkingEngine), VLLMEngine: NATIVE[:1]}


@pytest.mark.parametrize("implementation", PROTOCOLS)
def test_every_call_takes_what_the_protocol_says(implementation):
    names = set()
    for protocol in PROTOCOLS[implementation]:
        names |= {(protocol, name) for name in dir(protocol) if not name.startswith("_")}
    for protocol, name in names:
        said, made = getattr(protocol, name), getattr(implementation, name)
        assert isinstance(said, property) == isinstance(made, property), name
        if not isinstance(said, property):
            forms = []
            for call in (said, made):
                parameters = inspect.signature(call).parameters.values()
                forms.append([(p.name, p.kind, p.default) for p in parameters])
            assert forms[0] == forms[1], name


class Wrapped:
    """An engine in a wrapper that has its calls by __getattr__ alone."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)


def test_an_engine_in_a_wrapper_can_what_the_engine_can(engine):
    assert can_resume(Wrapped(engine)) == can_resume(engine) == hasattr(engine, "export_partials")
    assert can_stream(Wrapped(engine)) == can_stream(engine)


# --- from submit to pop_finished ---


def test_each_sample_waits_is_live_and_is_handed_out_once(engine):
    assert (engine.num_live, engine.num_waiting, engine.free_slots) == (0, 0, SLOTS)
    engine.submit(7, PROMPT, params(n=3), stream=1)
    engine.submit(8, torch.tensor([7, 5]), params(new=4, n=2))
    if can_talk(engine):  # a dialogue is live from its beginning
        assert (engine.num_live, engine.num_waiting, engine.free_slots) == (5, 0, 0)
    else:
        assert (engine.num_live, engine.num_waiting, engine.free_slots) == (0, 5, SLOTS)
    sampled = engine.step(1)
    assert (engine.num_waiting, engine.free_slots) == (1, 0)
    assert engine.num_live == (5 if can_talk(engine) else SLOTS)
    while engine.num_live or engine.num_waiting:
        sampled += engine.step(2)
    found = engine.pop_finished()
    assert engine.pop_finished() == [] and engine.step(1) == 0
    places = [(stream, c.ticket, c.sample_index) for stream, c in found]
    assert sorted(places) == [(0, 8, 0), (0, 8, 1), (1, 7, 0), (1, 7, 1), (1, 7, 2)]
    assert sampled == sum(c.token_ids.numel() for _, c in found) == 3 * 6 + 2 * 4


def test_completions_are_whole_records_of_the_version_in_force(engine):
    engine.submit(7, PROMPT, params(n=2))
    for c in finish(engine).values():
        assert c.prompt_ids.tolist() == PROMPT and c.finish_reason == "length"
        assert (c.token_ids.dtype, c.token_ids.shape) == (torch.int64, (6,))
        assert (c.generator_logprobs.dtype, c.generator_logprobs.shape) == (torch.float32, (6,))
        assert (c.generator_logprobs <= 0).all()
        assert c.policy_versions.tolist() == [3] * 6
        tensors = (c.prompt_ids, c.token_ids, c.generator_logprobs, c.policy_versions)
        assert not any(tensor.is_inference() for tensor in tensors), "a trainer takes them"


def test_a_stop_token_ends_a_completion_and_is_its_last_token(engine):
    engine.submit(0, PROMPT, params(temperature=0.0))
    tokens = finish(engine)[0, 0, 0].token_ids.tolist()
    stop = tokens[3]
    engine.submit(1, PROMPT, params(temperature=0.0, stop_token_ids=(stop,)))
    stopped = finish(engine)[0, 1, 0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == tokens[: tokens.index(stop) + 1]


def test_the_same_place_is_sampled_alike_again(engine):
    if can_talk(engine):
        pytest.skip("a ticket is in work once")
    for _ in range(2):
        engine.submit(5, PROMPT, params(n=2, seed=1))
    engine.step(9)
    twice = [c for _, c in engine.pop_finished()]
    assert len(twice) == 4
    for index in (0, 1):
        first, again = [c.token_ids[0].item() for c in twice if c.sample_index == index]
        assert first == again


def test_a_prompt_that_cannot_be_answered_and_a_step_of_no_token_are_refused_at_once(engine):
    for prompt_ids, message in (
        ([], "at least one token"),
        ([1] * 30, "exceed"),
        ([1, 10**6], "vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(0, prompt_ids, params(new=4))
    assert engine.num_waiting == 0
    with pytest.raises(ValueError, match="at least 1"):
        engine.step(0)


# --- between two steps ---


def test_new_weights_stamp_later_tokens_and_live_samples_go_on(engine):
    engine.submit(0, PROMPT, params(n=2))
    engine.step(2)
    engine.weights_changed(4)
    assert engine.policy_version == 4 and engine.num_live == 2
    for completion in finish(engine).values():
        assert completion.policy_versions.tolist() == [3] * 2 + [4] * 4


def test_what_is_aborted_keeps_its_tokens_and_the_rest_goes_on(engine):
    engine.submit(0, PROMPT, params(n=3))
    engine.submit(1, PROMPT, params(n=2))
    engine.step(2)
    assert engine.abort(1) == 2 and engine.abort(1) == 0
    aborted = {c.sample_index: c for _, c in engine.pop_finished()}
    assert {c.ticket for c in aborted.values()} == {1}
    assert {c.finish_reason for c in aborted.values()} == {"aborted"}
    assert [aborted[index].token_ids.numel() for index in (0, 1)] == [2, 0]
    rest = finish(engine)
    assert sorted(rest) == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    assert {c.finish_reason for c in rest.values()} == {"length"}


def test_streams_with_equal_tickets_are_aborted_apart(engine):
    engine.submit(0, PROMPT, params(), stream=0)
    engine.submit(0, PROMPT, params(), stream=1)
    engine.step(1)
    assert engine.abort(0, stream=1) == 1
    assert [(stream, c.ticket) for stream, c in engine.pop_finished()] == [(1, 0)]
    assert engine.abort() == 1 and engine.num_live == engine.num_waiting == 0


def test_scores_are_logprobs_a_token_and_change_nothing_of_what_runs(engine):
    engine.submit(0, PROMPT, params(temperature=0.0))
    undisturbed = finish(engine)[0, 0, 0]
    engine.submit(0, PROMPT, params(temperature=0.0))
    engine.step(2)
    logprobs = engine.score([4, 5], [6, 7, 4], 0.9)
    assert (logprobs.dtype, logprobs.shape) == (torch.float32, (3,)) and (logprobs < 0).all()
    assert finish(engine)[0, 0, 0].token_ids.tolist() == undisturbed.token_ids.tolist()


# --- while it samples ---


def test_new_tokens_are_told_once_and_are_those_of_the_completion(engine):
    if not can_stream(engine):
        pytest.skip("it does not tell what it samples")
    told = {}

    def listen():
        for new in engine.new_tokens(1):
            had = told.setdefault((new.ticket, new.sample_index), [])
            assert new.begin == len(had) and new.token_ids.dtype == torch.int64
            assert not new.token_ids.is_inference()
            had += new.token_ids.tolist()

    engine.submit(0, PROMPT, params(new=3, n=2), stream=0)
    engine.submit(7, PROMPT, params(new=9, n=3), stream=1)
    for steps in (1, 2, 1):
        for _ in range(steps):
            engine.step(1)  # of a step without a listener the tokens are told with the next ones
        listen()
    partials = engine.export_partials()
    ended = finish(engine, 9)
    listen()
    found = {(ticket, index): c for (stream, ticket, index), c in ended.items() if stream == 1}
    assert told.keys() == found.keys() and len(told[7, 0]) == 4
    for place, tokens in told.items():
        assert found[place].token_ids.tolist()[: len(tokens)] == tokens
    engine.abort()
    engine.pop_finished()
    told.clear()
    # What goes on is told from its first token on.
    (first, *_) = [partial for partial in partials if partial.stream == 1]
    engine.submit_partial(first)
    engine.step(1)
    listen()
    assert told[7, first.sample_index][: first.token_ids.numel()] == first.token_ids.tolist()


# --- over a checkpoint ---


def test_partial_completions_go_on_token_for_token(engine):
    if not can_resume(engine):
        pytest.skip("its samples start again")

    def submit():
        for ticket, count in ((0, 3), (1, 2)):
            engine.submit(ticket, PROMPT, params(n=count, seed=2))

    submit()
    whole = finish(engine)
    submit()
    engine.step(2)
    partials = engine.export_partials()
    assert len(partials) == 5
    engine.abort()
    engine.pop_finished()
    for partial in partials:
        engine.submit_partial(partial)
    assert tokens_of(finish(engine)) == tokens_of(whole)
