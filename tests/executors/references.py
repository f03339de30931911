"""A reference with a small random model and fakes on both sides, and what its scores must be."""

from __future__ import annotations

import torch

from executors.reference import Reference
from llamarl.executor import ExecutorGroup
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import load_weights
from llamarl.types import Group
from tests.build.group import build_group
from tests.executors.fakes import FakeReceiver, FakeSender
from tests.tolerances import rounding

NAN = float("nan")
# Nats: CONFIG's widest sum, the feed-forward's; two sums a layer and the head's; its logits' size.
LOGPROBS = rounding(terms=24, depth=2 * 2 + 1, size=2.0)
CONFIG = """{"architectures": ["LlamaForCausalLM"], "vocab_size": 29, "hidden_size": 16,
"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 2, "max_position_embeddings": 64,
"tie_word_embeddings": true}"""


def executor(model, *, temperature=1.0, microbatch_tokens=1000, **settings):
    made = Reference(
        model_path=str(model),
        model_dtype="float32",
        temperature=temperature,
        microbatch_tokens=microbatch_tokens,
        **settings,
    )
    group = ExecutorGroup("reference", (0,), 0, torch.device("cpu"))
    inputs = [(Group, FakeReceiver())]
    outputs = [(Group, FakeSender("groups"))]
    made.attach(group, inputs, outputs, control=None, metrics=None)
    made.setup()
    return made


def group(ticket=0, lengths=(3, 1, 6, 2), prompt=4):
    versions = torch.arange(sum(lengths))
    return build_group(ticket, lengths, prompt=prompt, vocab_size=29, policy_versions=versions)


def scored_all(ours, groups):
    """The logprobs of groups that come together."""
    ours.inputs.of(Group).records.extend(groups)
    while ours.step():
        pass
    sink = ours.outputs.of(Group)
    found = [g.ref_logprobs for g in sink.records]
    sink.records.clear()
    return found


def scored(ours, g):
    (logprobs,) = scored_all(ours, [g])
    return logprobs


@torch.no_grad()
def one_by_one(model, g, temperature=1.0):
    """Every token's logprob from whole logits of its own sequence."""
    decoder, out = load_weights(build_decoder(read_config(model)), model), []
    for completion in g.token_ids.split(g.lengths.tolist()):
        tokens = torch.cat([g.prompt_ids, completion])
        logits = (
            decoder(
                tokens, torch.arange(len(tokens)), PackedAttention(torch.tensor([0, len(tokens)]))
            )
            / temperature
        )
        logprobs = logits.log_softmax(-1)[len(g.prompt_ids) - 1 : -1]
        out.append(logprobs.gather(1, completion[:, None])[:, 0])
    return torch.cat(out)
