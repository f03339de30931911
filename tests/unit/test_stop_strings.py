"""Stop strings: the token that completes one ends the completion, wherever tokens begin and end."""

import dataclasses
from contextlib import closing
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executors.build import sampling_of
from llamarl.config.command_line import compose_config
from llamarl.evaluation.ask import submit
from llamarl.inference import Engine, SamplingParams, generate
from llamarl.inference.stop_strings import StopStrings, unescaped
from llamarl.models.config import tiny_directory
from llamarl.types import Prompt
from tests import engines
from tests.launching import ROOT

# A vocabulary by hand. Token 9 is the first two bytes of a character of three, 10 its last byte;
# token 0 is special and has no text.
PIECES = [b"", b"a", b"b", b"\n", b"a\n", b"\nb", b"ab", b" ", b"\n\nab", "€".encode()[:2], b"\xac"]


def decode(token_ids):
    return b"".join(PIECES[i] for i in token_ids).decode(errors="replace")


def by_definition(ids, strings, least):
    """The fewest tokens, at least `least`, whose last one brought the end of a stop string."""
    for end in range(least, len(ids) + 1):
        before = decode(ids[: end - 1]).rstrip("\ufffd")
        text = decode(ids[:end])
        for string in strings:
            for place in range(len(text)):
                ends_here = place + len(string) > len(before)
                if text.startswith(string, place) and ends_here:
                    return end
    return None


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=40),
    strings=st.lists(st.sampled_from(["\n\n", "ab", "b\na", "€", " €a"]), min_size=1, max_size=2),
    least=st.integers(1, 6),
    chunk=st.integers(1, 9),
)
def test_any_chunk_finds_the_end_that_the_whole_text_has(ids, strings, least, chunk):
    stops = StopStrings(strings, decode)
    found = None
    for seen in range(0, len(ids), chunk):
        found = stops.end_of(ids[: seen + chunk], seen=seen, least=least)
        if found is not None:
            break
    assert found == by_definition(ids, strings, least)


def test_a_text_that_is_decoded_from_inside_of_a_character_hides_no_stop_string():
    """A token a byte, as where a tokenizer falls back: of "€" two may be left out."""
    for before in range(40):
        ids = list(("x" * before + "€ab").encode())
        stops = StopStrings(("€ab",), lambda ids: bytes(ids).decode(errors="replace"))
        assert stops.end_of(ids, seen=len(ids) - 1) == len(ids)


@pytest.mark.parametrize(
    "typed, meant",
    [
        (r"\n\n", "\n\n"),
        ("\n\n", "\n\n"),
        (r"\\n", r"\n"),
        (r"\boxed", r"\boxed"),
        ("a\\", "a\\"),
        (r"\t\r", "\t\r"),
    ],
)
def test_a_command_line_can_say_a_line_break(typed, meant):
    assert unescaped(typed) == meant


def test_what_the_command_line_says_is_what_samples_and_greedy_answers_end_at():
    config = compose_config([r"generator.stop=['\n\n','Q:']"])
    sampling = sampling_of(config, SimpleNamespace(stop_token_ids=(2,)))
    asked = [sampling]
    engine = SimpleNamespace(submit=lambda index, ids, params, stream: asked.append(params))
    submit(engine, 0, Prompt(torch.tensor([4]), "", {}), sampling, num_samples=2)
    assert [params.temperature for params in asked] == [1.0, 0.0, 1.0]
    assert [params.stop_strings for params in asked] == [("\n\n", "Q:")] * 3


def test_an_empty_stop_string_is_refused():
    for strings in ((), ("a", "")):
        with pytest.raises(ValueError, match="stop_strings"):
            StopStrings(strings, decode)
    with pytest.raises(ValueError, match="stop_strings"):
        SamplingParams(4, stop_strings=("a", ""))


# --- in an engine ---


def small_engine(**options):
    return Engine.from_hf(tiny_directory(), dtype="float32", device="cpu", **options)


def letters(token_ids):
    """A text of two letters a token, so that a stop string may begin in the middle of one."""
    return "".join(chr(97 + i % 7) + chr(97 + i // 7 % 7) for i in token_ids)


def cut(completion, strings, least=1):
    """The tokens and the reason that the completion has if it ends at these strings."""
    ids = completion.token_ids.tolist()
    for end in range(least, len(ids) + 1):
        before = 2 * (end - 1)
        if any(letters(ids[:end]).find(s, max(0, before - len(s) + 1)) >= 0 for s in strings):
            return ids[:end], "stop"
    return ids, completion.finish_reason


PROMPTS = [[4, 5, 6], [7, 5], [4, 4, 4, 9]]


@pytest.mark.parametrize("chunk", [3, 32])
def test_the_engine_cuts_what_it_samples_without_them(chunk):
    engine = small_engine(max_slots=5, max_len=32, decode=letters)
    free = SamplingParams(16, temperature=4.0, n=4)
    whole = list(chain.from_iterable(generate(engine, PROMPTS, free)))
    text = letters(whole[0].token_ids.tolist())
    strings = (text[7:10], text[20:23])
    params = dataclasses.replace(free, stop_strings=strings, min_new_tokens=2)
    groups = generate(engine, PROMPTS, params, chunk_tokens=chunk)
    ended = list(chain.from_iterable(groups))
    expected = [cut(c, strings, least=2) for c in whole]
    assert [(c.token_ids.tolist(), c.finish_reason) for c in ended] == expected
    assert "stop" in {reason for _, reason in expected}
    for one, other in zip(ended, whole):
        count = one.token_ids.numel()
        assert one.generator_logprobs.numel() == one.policy_versions.numel() == count
        assert one.generator_logprobs == pytest.approx(other.generator_logprobs[:count], abs=1e-5)


def test_each_token_is_decoded_a_few_times_however_long_a_completion_is():
    decoded = []

    def counted(token_ids):
        decoded.append(len(token_ids))
        return letters(token_ids)

    engine = small_engine(max_slots=1, max_len=160, decode=counted)
    params = SamplingParams(128, temperature=4.0, stop_strings=("#",))
    generate(engine, PROMPTS[:1], params, chunk_tokens=4)
    assert max(decoded) <= 32 and sum(decoded) <= 16 * 128


def test_a_sample_that_goes_on_elsewhere_ends_at_the_same_token():
    def engine():
        return small_engine(max_slots=4, max_len=32, decode=letters)

    ((whole,),) = generate(engine(), PROMPTS[:1], SamplingParams(16, temperature=4.0))
    text = letters(whole.token_ids.tolist())
    string = text[15:19]  # it begins in the middle of the eighth token
    expected = cut(whole, (string,))
    assert len(expected[0]) > 5
    first, second = engine(), engine()
    params = SamplingParams(16, temperature=4.0, stop_strings=(string,))
    first.submit(0, PROMPTS[0], params)
    first.step(len(expected[0]) - 1)
    (partial,) = first.export_partials()
    second.submit_partial(partial)
    second.step(32)
    ((_, completion),) = second.pop_finished()
    assert (completion.token_ids.tolist(), completion.finish_reason) == expected


def test_stop_strings_need_a_decode(tmp_path, monkeypatch):
    for make in (engines.native, engines.vllm_over_stand_in):
        engine = make(tmp_path / "log", monkeypatch, max_slots=2, max_len=16)
        with pytest.raises(ValueError, match="decode"):
            engine.submit(0, [4], SamplingParams(4, stop_strings=("a",)))
        assert engine.num_waiting == 0
        engine.close()


def test_only_kept_tokens_of_vllm_count_and_what_it_ended_itself_is_not_aborted(
    tmp_path, monkeypatch
):
    log = tmp_path / "log"
    with closing(
        engines.vllm_over_stand_in(log, monkeypatch, max_slots=2, max_len=32, decode=letters)
    ) as engine:
        engine.weights_changed(0)
        ((whole,),) = generate(engine, [[4]], SamplingParams(12))
        string = letters(whole.token_ids.tolist())[5:8]
        kept = len(cut(whole, (string,))[0])
        # With room for these tokens alone vLLM ends at the same one; with more it goes on.
        for room in (kept, 12):
            engine.submit(0, [4], SamplingParams(room, stop_strings=(string,)))
            count = 0
            while engine.num_live or engine.num_waiting:
                count += engine.step(8)
            ((_, ended),) = engine.pop_finished()
            assert (count, ended.finish_reason) == (kept, "stop")
        generate(engine, [[4]], SamplingParams(2))
    # It is told of the one that went on alone.
    told = [line for line in log.read_text().splitlines() if '"abort": ["' in line]
    assert len(told) == 1 and '"abort": ["2"]' in told[0]


# --- generate ---


def test_generate_refuses_an_engine_at_work_and_leaves_none_behind():
    engine = small_engine(max_slots=2, max_len=16)
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        generate(engine, [[4], [10**6]], SamplingParams(4))
    assert (engine.num_live, engine.num_waiting) == (0, 0)
    ((alone,),) = generate(engine, [[4]], SamplingParams(4))
    assert alone.ticket == 0 and alone.token_ids.numel() == 4
    engine.submit(3, [4], SamplingParams(4))
    with pytest.raises(ValueError, match="at work"):
        generate(engine, [[4]], SamplingParams(4))


def test_the_example_of_the_guide_runs(monkeypatch, capsys):
    guide = (ROOT / "docs" / "models.md").read_text()
    (example,) = [block for block in guide.split("```python\n")[1:] if "generate(" in block]
    monkeypatch.chdir(ROOT)
    exec(compile(example.split("```")[0], "docs/models.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2
