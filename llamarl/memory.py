"""Predicts the bytes of a model that is trained, sampled from or asked, by its shapes alone.

    update_bytes(config, longest_microbatch(...), training)
    UpdateBytes(held=..., working=...)

Every term is counted from the model's shapes, as llamarl.models and llamarl.learning make the
tensors; nothing is fitted. benchmarks/memory.py compares with what an update allocates. The dry run
(llamarl/launch/memory.py) and the planner ask here. This file imports no torch.

An update is counted as on a CPU with the C kernels, with one microbatch as long as the config
allows. The first update has no moments until its end and takes less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from llamarl.models.config import ModelConfig
from llamarl.models.shape import Lora
from llamarl.models.sharding import (
    Shape,
    adapter_shapes,
    heads_of,
    num_parameters,
    parameter_shapes,
    tensor_parallel_box,
)

# Up to this many logits are one chunk, kept for backward: recomputing them would cost more than it
# saves.
KEEP_LOGITS = 1 << 22
CHUNK_TOKENS = 1024  # rows of logits at a time
# Up to this many bytes logits are kept for backward, even if they are several chunks.
KEEP_BYTES = 1 << 26

GIB = 1 << 30
WIDE = 4  # bytes of a float32 number: of masters, gradients and sums
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
# A sender's slots and a receiver's buffers: a version leaves from one while the next is copied to
# the other.
SLOTS = 2
# By itemsize: up to so many keys a CPU holds the weights of attention (llamarl.models.attention).
ATTENTION_KEYS = {2: 512, 4: 256}
MOMENTS = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256)}  # bytes of a trained number, by optimizer


@dataclass(frozen=True, slots=True)
class Price:
    """The bytes that a part of a job, such as "trainer", takes on each of its ranks.

    held: all the time. working: on top of it, at the peak of a step.
    """

    name: str
    ranks: tuple[int, ...]
    held: int
    working: int = 0

    @property
    def total(self) -> int:
        """The most bytes at a time."""
        return self.held + self.working


# --- A model that is sampled from or asked ---


def held_numbers(config: ModelConfig, *, tensor_parallel: int, shards: int) -> int:
    """Return how many numbers of a model the rank that holds most has: its rows of its
    tensor-parallel part.
    """
    total = 0
    for name, shape in _one_layer(config).items():
        own = _own_numbers(config, name, shape, tensor_parallel, shards)
        total += own * (config.num_hidden_layers if name.startswith("model.layers.") else 1)
    return total


def weights_bytes(
    config: ModelConfig, dtype: str, num_ranks: int, *, tensor_parallel: int, replicate: int
) -> int:
    """Return the bytes of a model on each of the ranks that hold `replicate` copies of it."""
    shards = num_ranks // (replicate * tensor_parallel)
    numbers = held_numbers(config, tensor_parallel=tensor_parallel, shards=shards)
    return numbers * ITEMSIZES[dtype]


def numbers_of_token(config: ModelConfig, split: int = 1) -> int:
    """Return how many numbers the keys and values of a token are, over all layers, on the rank
    that holds most of `split` that share each layer.
    """
    if config.implementation == "transformers":
        heads = config.num_key_value_heads // (split if config.split_heads else 1)
    else:
        heads = max(heads_of(config, rank, split).num_kv for rank in range(split))
    return 2 * config.num_hidden_layers * heads * config.head_dim


def cache_bytes(config: ModelConfig, tokens: int, dtype: str, split: int = 1) -> int:
    """Return the bytes of the keys and values of so many tokens."""
    return tokens * numbers_of_token(config, split) * ITEMSIZES[dtype]


def sampling_bytes(config: ModelConfig, slots: int) -> int:
    """Return the bytes of a decode step: the logits of all slots."""
    return slots * config.vocab_size * WIDE


def asking_bytes(config: ModelConfig, size: MicrobatchSize, dtype: str) -> int:
    """Return the bytes of a forward without gradients: a layer's hidden units, and a chunk of
    logits.
    """
    numbers = size.tokens * (4 * config.hidden_size + 3 * config.intermediate_size)
    if not config.labels:
        numbers += min(size.labels, CHUNK_TOKENS) * config.vocab_size
    return numbers * ITEMSIZES[dtype]


def encoder_numbers(path: str | Path) -> int:
    """Return how many numbers a model has that transformers reads, by its config.json."""
    import torch
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):  # it is built without memory
        model = AutoModel.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


# --- A model that is trained ---


@dataclass(frozen=True, slots=True)
class MicrobatchSize:
    """The sizes of a microbatch: packed prompts, each followed by its completions.

    prompts, completions: how many. prompt_tokens, completion_tokens: tokens of each.
    """

    prompts: int
    completions: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        """The packed tokens. A prompt is packed once for all its completions."""
        return self.prompts * self.prompt_tokens + self.completions * self.completion_tokens

    @property
    def seen(self) -> int:
        """The keys that a completion's last token sees."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def labels(self) -> int:
        """The tokens that are trained on."""
        return self.completions * self.completion_tokens


def longest_microbatch(
    *,
    prompt_tokens: int,
    completion_tokens: int,
    group_size: int,
    budget_tokens: int,
    whole_groups: bool = False,
    num_groups: int | None = None,
) -> MicrobatchSize:
    """Return the largest microbatch that packing makes of the longest sequences. whole_groups: the
    loss needs the completions of a group together. num_groups: groups of an update; None: many.

        longest_microbatch(prompt_tokens=4500, completion_tokens=64, group_size=2,
                           budget_tokens=1024)
        MicrobatchSize(prompts=1, completions=1, prompt_tokens=4500, completion_tokens=64)
    """
    of_group = prompt_tokens + group_size * completion_tokens
    if whole_groups or of_group <= budget_tokens:
        prompts = max(1, budget_tokens // of_group)
        if num_groups is not None:
            prompts = min(prompts, max(1, num_groups))
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


@dataclass(frozen=True, slots=True)
class Training:
    """How a rank trains a decoder.

    itemsize: bytes of a number in the decoder's forward. checkpointing: each layer keeps only its
    input and is recomputed for its backward. several: an update has more than one microbatch, so
    gradients of earlier ones are held. lora_rank: 0: all weights are trained. tensor_parallel,
    shards: ranks that share each layer, and FSDP2's shards of each such part. moment_bytes: of a
    trained number, by the optimizer. has_average: a moving average of the trained numbers is kept.
    """

    itemsize: int
    checkpointing: bool = False
    several: bool = True
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    tensor_parallel: int = 1
    shards: int = 1
    moment_bytes: float = 8.0
    has_average: bool = False
    on_cpu: bool = True


@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """The bytes of an update. held: weights, moments and averages, from step to step. gradients:
    from the backward of an update to the start of the next one. working: the peak of forward and
    backward on top of `held`, with gradients. copies: weights in a lower precision, held between
    microbatches.
    """

    held: int
    gradients: int
    working: int
    copies: int


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Counts of numbers: of one layer, and outside of the layers. embedding: the part of `around`
    that is the embedding.
    """

    layer: int
    around: int
    embedding: int


def update_bytes(config: ModelConfig, size: MicrobatchSize, training: Training) -> UpdateBytes:
    """Return the bytes of a decoder that is trained, on the rank that holds the most."""
    own = _numbers(config, training, training.shards)
    layers = config.num_hidden_layers
    adapters = _adapters(config, training)
    held_weights = layers * own.layer + own.around
    trained = layers * own.layer + own.around
    if training.lora_rank:
        trained = layers * adapters // training.shards
        held_weights += trained
    of_trained = training.moment_bytes + (WIDE if training.has_average else 0)
    peak = _Peak(config, size, training)
    return UpdateBytes(
        held=math.ceil(WIDE * held_weights + of_trained * trained),
        gradients=WIDE * trained,
        working=peak.bytes(),
        copies=peak.copies if training.several else 0,
    )


def checkpoint_bytes(config: ModelConfig, training: Training, export_itemsize: int) -> float:
    """Return about how many bytes a checkpoint of all ranks takes on disk: the trained numbers with
    their moments, and the exported weights.
    """
    trained = num_parameters(config)
    if training.lora_rank:
        trained = _adapters(config, training) * config.num_hidden_layers
    copies = 2 if training.has_average else 1
    of_number = copies * WIDE + training.moment_bytes
    return trained * of_number + copies * num_parameters(config) * export_itemsize


def _one_layer(config: ModelConfig) -> dict[str, Shape]:
    """Return name -> shape of the parameters of the first layer and around the layers: all layers
    are alike.
    """
    return parameter_shapes(replace(config, num_hidden_layers=1))


def _own_numbers(
    config: ModelConfig,
    name: str,
    shape: Shape,
    tensor_parallel: int,
    shards: int,
) -> int:
    last = tensor_parallel - 1  # its share is the largest
    box = tensor_parallel_box(config, name, shape, last, tensor_parallel, split_vocabulary=False)
    rows = box.lengths[0]
    return math.ceil(rows / shards) * (box.numel // rows)


def _numbers(config: ModelConfig, training: Training, shards: int) -> _Numbers:
    layer = around = embedding = 0
    for name, shape in _one_layer(config).items():
        count = _own_numbers(config, name, shape, training.tensor_parallel, shards)
        if name.startswith("model.layers."):
            layer += count
        else:
            around += count
        if name == "model.embed_tokens.weight":
            embedding = count
    return _Numbers(
        layer=layer,
        around=around,
        embedding=embedding,
    )


def _adapters(config: ModelConfig, training: Training) -> int:
    """Return the numbers of a layer's adapters, over all shards; 0 without any."""
    if not training.lora_rank:
        return 0
    lora = Lora(training.lora_rank, 1.0, training.lora_targets)
    shapes = adapter_shapes(replace(config, num_hidden_layers=1, lora=lora))
    split = training.tensor_parallel
    return sum(_own_numbers(config, name, shape, split, 1) for name, shape in shapes.items())


class _Peak:
    """Computes the most bytes that an update holds at a time on top of weights and moments.

    The peak may be at one of six moments: the head's forward, two in the head's backward, the
    backward of the last layer and of the first, and the embedding's backward.
    """

    def __init__(self, config: ModelConfig, size: MicrobatchSize, training: Training):
        self.config = config
        self.size = size
        self.training = training
        item = training.itemsize
        layers = config.num_hidden_layers
        whole = _numbers(config, training, 1)
        adapters = _adapters(config, training)
        self.trains_all = not training.lora_rank
        self.is_low = item < WIDE
        self.width = item * config.hidden_size * size.tokens
        self.hidden = item * config.intermediate_size // training.tensor_parallel * size.tokens
        self.layer = _layer_bytes(config, size, training)
        computed = whole.layer + adapters
        self.layer_gradients = computed if self.trains_all else adapters  # numbers
        self.around_gradients = whole.around if self.trains_all else 0
        self.embedding = whole.embedding
        # The forward reads copies of the masters in a lower precision. With FSDP2 it reads weights
        # that are gathered for each layer, so there are no copies.
        self.layer_copy = item * computed if self.is_low else 0
        self.around_copy = item * whole.around if self.is_low else 0
        self.copies = layers * self.layer_copy + self.around_copy
        self.gathered = 0
        if training.shards > 1:
            self.layer_copy = self.around_copy = self.copies = 0
            # The current layer, the next one, and the buffer that the next one is gathered into.
            self.gathered = item * (whole.around + 3 * computed)

    def bytes(self) -> int:
        """Return the largest of all moments."""
        t = self.training
        gradients = self.config.num_hidden_layers * self.layer_gradients + self.around_gradients
        before = WIDE * gradients // t.shards if t.several else 0
        moments = [
            *self._head(),
            self._layer_backward(self.config.num_hidden_layers),
            self._layer_backward(1),
            self._embedding_backward(),
        ]
        shared = before + self.gathered + self._kept_logits() + _angles(self.config, self.size)
        mask = self.training.itemsize * _mask_elements(self.size, t)
        return max(max(moments) + shared + mask, WIDE * gradients // t.shards)

    # --- Moments ---

    def _activations(self, layers: int) -> int:
        """Return what the first `layers` layers hold for backward."""
        return layers * (self.width if self.training.checkpointing else self.layer)

    def _copies(self, layers: int) -> int:
        """Return the bytes of copies while the first `layers` layers have yet to go backward."""
        if self.training.several:  # the next microbatch reads them again
            return self.copies
        if self.training.checkpointing:
            return 0
        return layers * self.layer_copy

    def _head(self) -> list[int]:
        """Return the bytes at the head's forward, and at two moments of its backward."""
        t = self.training
        config = self.config
        layers = config.num_hidden_layers
        item = t.itemsize
        rows = item * config.hidden_size * self.size.labels
        # The width is the output of the last layer.
        held = self._activations(layers) + self.width
        logits = self._logits()
        forward = held + self.width + rows + self.copies + logits
        copies = self._copies(layers)
        found = held + 2 * rows + max(copies, self.around_copy) + logits
        found += self._head_gradient()
        # The gradient of the head's rows is scattered into one of all tokens.
        behind = held + rows + 2 * self.width + copies + self._held_gradient()
        return [forward, found, behind]

    def _logits(self) -> int:
        """Return the bytes of one chunk: its logits, unless they are kept, and float32 buffers."""
        config = self.config
        if config.labels:
            return 2 * WIDE * config.hidden_size * self.size.labels
        chunk = self._chunk() * config.vocab_size
        logits = 0 if self._kept_logits() else chunk * self.training.itemsize
        if not self.training.on_cpu:  # the C kernel needs no softmax in float32
            logits += 3 * chunk * WIDE
        return logits

    def _chunk(self) -> int:
        """Return how many rows of logits are computed at a time."""
        rows = self.size.labels
        is_whole = rows * self.config.vocab_size <= KEEP_LOGITS
        return rows if is_whole else min(rows, CHUNK_TOKENS)

    def _kept_logits(self) -> int:
        """Return the bytes of logits that are kept for backward. A CPU reuses their memory for the
        next microbatch.
        """
        if self.config.labels:
            return 0
        logits = self.size.labels * self.config.vocab_size
        num_bytes = logits * self.training.itemsize
        is_kept = logits <= KEEP_LOGITS or num_bytes <= KEEP_BYTES
        return num_bytes if is_kept else 0

    def _head_gradient(self) -> int:
        """Return the bytes of the gradient of the head's weight while it is computed. Chunks are
        summed in float32.
        """
        if not self.trains_all or self.config.labels:
            return 0
        item = self.training.itemsize
        weight = self.config.vocab_size * self.config.hidden_size
        if self.size.labels > self._chunk():
            return (WIDE + item) * weight
        return item * weight

    def _held_gradient(self) -> int:
        """Return the bytes of the head's gradient while layers go backward; 0 if it is already in
        the gradient of the master.
        """
        if not self.trains_all or self.config.labels:
            return 0
        weight = self.config.vocab_size * self.config.hidden_size
        # A copy's or a shard's gradient is not the master's, and a tied one waits for the
        # embedding's.
        waits = self.is_low or self.training.shards > 1 or self.config.tie_word_embeddings
        if waits or not self.training.several:
            return self.training.itemsize * weight
        return 0

    def _layer_backward(self, number: int) -> int:
        """Return the bytes at the backward of layer `number`, 1 the first. The layers before it
        still hold their activations, and those after it have gradients.
        """
        t = self.training
        below = self._activations(number - 1) + self.width
        behind = self.config.num_hidden_layers - number
        made = 0 if t.several else behind * WIDE * self.layer_gradients // t.shards
        again = 0
        if t.checkpointing:
            again = self.width
            if not t.several:
                again += self.layer_copy
        # First the gradients of the MLP's hidden units, while its inputs are held. The gradients of
        # the weights come later; those of copies wait until the whole layer is done.
        at_mlp = self.layer + 2 * self.hidden + self.width
        of_mlp = self.config.hidden_size * self.config.intermediate_size // t.tensor_parallel
        at_mlp += t.itemsize * of_mlp if self.trains_all else 0
        waiting = t.itemsize if self.is_low or t.shards > 1 else 0
        if not t.several and not waiting:
            waiting = WIDE
        # Attention over few keys holds its weights, and in its backward twice their gradients.
        heads = self.config.num_attention_heads // t.tensor_parallel
        pairs = t.itemsize * heads * _short_pairs(self.size, t)
        at_attention = self.layer - 3 * self.hidden + 2 * pairs + self.width
        if waiting and self.trains_all:
            at_attention += t.itemsize * 3 * of_mlp
        at_end = 2 * self.width + waiting * self.layer_gradients
        in_master = self.layer_gradients if t.shards > 1 else of_mlp * self.trains_all
        at_end += WIDE * in_master
        held = self._held_gradient()
        peak = max(at_mlp, at_attention, at_end)
        return below + made + again + held + self._copies(number) + peak

    def _embedding_backward(self) -> int:
        """Return the bytes at the embedding's gradient, after those of all layers."""
        t = self.training
        made = 0
        if not t.several:
            made = WIDE * self.config.num_hidden_layers * self.layer_gradients // t.shards
        if not self.trains_all:
            return made + self._copies(0) + self.width
        found = self._held_gradient()
        if t.shards > 1:
            found = (t.itemsize + WIDE) * self.around_gradients
        elif not self.is_low:
            found += WIDE * self.embedding
        else:
            # The tokens' rows are added to the master's gradient in float32.
            found += 0 if t.several else WIDE * self.around_gradients
            found += WIDE * self.config.hidden_size * self.size.tokens
        return made + found + self.width + self._copies(0)


def layer_elements(config: ModelConfig, size: MicrobatchSize, training: Training) -> int:
    """Return how many numbers a layer holds for its backward, in the precision of its forward."""
    split = training.tensor_parallel
    d = config.hidden_size
    queries = config.num_attention_heads * config.head_dim // split
    keys = config.num_key_value_heads * config.head_dim // split
    hidden = config.intermediate_size // split
    # Two residual sums and two norms; the queries, and the attention's result in token order; of
    # the MLP the gate, what goes up, and their product.
    of_token = 4 * d + 2 * queries + 3 * hidden
    of_token += training.lora_rank * len(training.lora_targets)
    if config.traits.qk_norm:
        of_token += queries + keys
    # Keys and values of a prompt, and once more for each completion that attends to them.
    places = size.prompts * size.prompt_tokens + size.completions * size.seen
    elements = size.tokens * of_token + 2 * keys * places
    elements += queries * _long_tokens(size, training)
    return elements + config.num_attention_heads // split * _short_pairs(size, training)


def _limit(training: Training) -> int:
    """Return the number of keys up to which attention holds its weights: on a CPU only."""
    return ATTENTION_KEYS[training.itemsize] if training.on_cpu else 0


def _long_tokens(size: MicrobatchSize, training: Training) -> int:
    """Return the tokens of sequences whose attention is a fused kernel, which holds its results."""
    limit = _limit(training)
    tokens = 0
    if size.prompt_tokens > limit:
        tokens += size.prompts * size.prompt_tokens
    if size.seen > limit:
        tokens += size.labels
    return tokens


def _short_pairs(size: MicrobatchSize, training: Training) -> int:
    """Return the pairs of query and key of the other sequences, whose weights are held."""
    limit = _limit(training)
    pairs = 0
    if size.prompt_tokens <= limit:
        pairs += size.prompts * size.prompt_tokens**2
    if size.seen <= limit:
        pairs += size.labels * size.seen
    return pairs


def _layer_bytes(config: ModelConfig, size: MicrobatchSize, training: Training) -> int:
    """Return the bytes that a layer holds for its backward."""
    elements = layer_elements(config, size, training)
    heads = config.num_attention_heads // training.tensor_parallel
    # Each row's root mean square of both norms, and its sum of the softmax.
    wide = 2 * size.tokens + heads * _long_tokens(size, training)
    num_bytes = training.itemsize * elements + WIDE * wide
    if 0 < size.prompt_tokens <= _limit(training) < size.seen:
        num_bytes += size.prompt_tokens**2  # a short prompt beside long ones has a mask of bools
    return num_bytes


def _mask_elements(size: MicrobatchSize, training: Training) -> int:
    """Return the numbers of the masks of completions over their prompts, which all layers share."""
    if size.seen <= _limit(training):
        return 0
    return size.labels * size.seen


def _angles(config: ModelConfig, size: MicrobatchSize) -> int:
    """Return the bytes of the rotary tables, and of every token's cosines and sines."""
    table = 1 << max(8, (size.seen - 1).bit_length())
    return 2 * WIDE * config.head_dim * (table + size.tokens)
