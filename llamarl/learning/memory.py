"""What the activations of a training step take, before anything is allocated.

    activation_bytes(config, longest_microbatch(...), itemsize=2, checkpointing=False)

Counted is what autograd holds between forward and backward, and the buffers of the head, as
llamarl.models and llamarl.learning.logprobs make them. Not counted are weights, gradients and the
optimizer's moments, which do not depend on the length of a sequence.

Shapes as a decoder has them: D hidden_size, F intermediate_size, H query heads, J key/value heads,
K head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.learning.logprobs import CHUNK_TOKENS, KEEP_BYTES, KEEP_LOGITS
from llamarl.models.attention import SHORT
from llamarl.models.config import ModelConfig

_WIDE = 4  # bytes of a float32 number
_SHORT = min(SHORT.values())  # keys up to which a CPU's own kernel makes no mask


@dataclass(frozen=True, slots=True)
class MicrobatchSize:
    """The sizes of a microbatch: packed prompts, each with the completions behind it.

    prompts, completions: how many. prompt_tokens, completion_tokens: tokens of each.
    """

    prompts: int
    completions: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        """Packed tokens, a prompt once for all its completions."""
        return self.prompts * self.prompt_tokens + self.completions * self.completion_tokens


def longest_microbatch(
    *,
    prompt_tokens: int,
    completion_tokens: int,
    group_size: int,
    budget_tokens: int,
    whole_groups: bool = False,
) -> MicrobatchSize:
    """The largest microbatch that packing makes of the longest sequences. whole_groups: the loss
    needs the completions of a group together.

        longest_microbatch(prompt_tokens=4500, completion_tokens=64, group_size=2,
                           budget_tokens=1024)
        MicrobatchSize(prompts=1, completions=1, prompt_tokens=4500, completion_tokens=64)
    """
    of_group = prompt_tokens + group_size * completion_tokens
    if whole_groups or of_group <= budget_tokens:
        prompts = max(1, budget_tokens // of_group)
        completions = prompts * group_size
    else:
        prompts = 1
        completions = max(1, (budget_tokens - prompt_tokens) // completion_tokens)
    return MicrobatchSize(
        prompts=prompts,
        completions=completions,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )


def activation_bytes(
    config: ModelConfig,
    size: MicrobatchSize,
    *,
    itemsize: int,
    checkpointing: bool,
    tensor_parallel: int = 1,
    device: str = "cpu",
) -> int:
    """Bytes at the peak of a forward and backward on one rank.

    itemsize: bytes of a number as the decoder computes. checkpointing: a layer's activations are
    made again for its backward, and only what comes into it is held. device: elsewhere than on a
    CPU the softmax over the vocabulary is held in float32 besides.
    """
    layer = layer_elements(config, size, tensor_parallel)
    width = config.hidden_size * size.tokens
    held = config.num_hidden_layers * (width if checkpointing else layer)
    # A layer's gradients while it goes backward, and what checkpointing makes again of it.
    working = layer if checkpointing else 0
    working += 2 * width + 2 * size.tokens * config.intermediate_size // tensor_parallel
    ends = 3 * width  # embedded tokens, the last norm's input and output
    elements = held + ends + _mask_elements(size)
    head = _head_bytes(config, size, itemsize, device)
    # Layers go backward when the head is done: of the two the larger counts.
    return elements * itemsize + max(head, working * itemsize)


def layer_elements(config: ModelConfig, size: MicrobatchSize, tensor_parallel: int) -> int:
    """Numbers that a layer holds for its backward."""
    d = config.hidden_size
    queries = config.num_attention_heads * config.head_dim // tensor_parallel
    keys = config.num_key_value_heads * config.head_dim // tensor_parallel
    hidden = config.intermediate_size // tensor_parallel
    # Two sums, two norms and the joined output of attention; queries and what comes of them.
    of_token = 5 * d + 2 * queries
    of_token += (3 if config.traits.gated else 2) * hidden
    if config.traits.qk_norm:
        of_token += queries + keys
    seen = size.prompt_tokens + size.completion_tokens
    # Keys and values of a prompt, and again beside each completion that sees them.
    places = size.prompts * size.prompt_tokens + size.completions * seen
    return size.tokens * of_token + 2 * keys * places


def _mask_elements(size: MicrobatchSize) -> int:
    """Numbers of the masks of completions behind their prompts, which all layers share."""
    seen = size.prompt_tokens + size.completion_tokens
    if seen <= _SHORT:
        return 0
    return size.completions * size.completion_tokens * seen


def _head_bytes(config: ModelConfig, size: MicrobatchSize, itemsize: int, device: str) -> int:
    """Logits and the gradient of the head's weight, as chunked_logprobs holds them, and the
    embedding's gradient, which is as large.
    """
    rows = size.completions * size.completion_tokens
    vocabulary = config.vocab_size
    weight = vocabulary * config.hidden_size
    is_whole = rows * vocabulary <= KEEP_LOGITS
    chunk = rows if is_whole else min(rows, CHUNK_TOKENS)
    is_kept = is_whole or rows * vocabulary * itemsize <= KEEP_BYTES
    logits = (rows if is_kept else chunk) * vocabulary * itemsize
    if device != "cpu":
        logits += 3 * chunk * vocabulary * _WIDE
    gradient = 2 * weight * itemsize  # of the head's weight, and of the embedding's
    if rows > chunk:  # chunks add up in float32
        gradient += 2 * weight * _WIDE
    return logits + gradient
