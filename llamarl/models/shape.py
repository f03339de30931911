"""ModelConfig: what a config.json says of a decoder, read and checked. Needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from llamarl.models.families import CAUSAL, FAMILIES, Family

Shape = tuple[int, ...]
Shapes = tuple[tuple[str, Shape], ...]  # of named tensors

AUTO = "auto"  # our own modules where they can, else transformers'
IMPLEMENTATIONS = (AUTO, "native", "transformers")
SCORER = "ForSequenceClassification"  # its head gives num_labels scores in place of logits
HEADS = ("lm_head.weight", "embed_out.weight")  # ends of a language model's head's names
# Ends of names: what older files keep of rotary tables, places and causal masks.
RECREATED = (
    "rotary_emb.inv_freq",
    "position_ids",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)
LABEL = "LABEL_0"  # of one score, as transformers calls it
# Fields that change no layer of an evaluated model: provenance, training, defaults of sampling.
HARMLESS = re.compile(
    r"_.*|.*bias|.*dropout|.*pdrop|summary_.*|(.+_)?token_id|unsloth_.*|(.+_)?attn_implementation"
    r"|architectures|model_type|(torch_)?dtype|transformers_version|use_cache|auto_map|name_or_path"
    r"|initializer_range|gradient_checkpointing|pretraining_tp|is_decoder|chunk_size_feed_forward"
    r"|label2id|num_labels|problem_type|finetuning_task|task_specific_params|tokenizer_class|prefix"
    r"|n_ctx|reorder_and_upcast_attn|max_window_layers|max_sequence_length|model_max_length"
    r"|is_llama_config|transformers\.js_config|use_bfloat16|torchscript|tf_legacy_loss|return_dict"
    r"|output_(hidden_states|attentions|scores)|return_dict_in_generate|(max|min)_length|do_sample"
    r"|early_stopping|(.*_)?num_beams|num_beam_groups|num_return_sequences|temperature|top_[kp]"
    r"|typical_p|.*_penalty|(encoder_)?no_repeat_ngram_size|bad_words_ids|(begin_)?suppress_tokens"
    r"|max_new_tokens|remove_invalid_values|predict_special_tokens|output_past|n_special"
    r"|custom_pipelines|neftune_noise_alpha|pruned_heads"
)


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters beside projections. rank: r of each. alpha: their product counts alpha / r.
    targets: Hugging Face names of projections. seed: of the A that training starts from.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int = 0

    @property
    def scaling(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of a config.json that determine the decoder's shape, under Hugging Face's
    names.
    """

    architecture: str  # LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool  # False in a scorer, which has no logits
    # Of our own layers alone.
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    rope_scaling: dict | None = None
    attention_bias: bool = False
    labels: tuple[str, ...] = ()  # of a sequence-classification model's scores
    lora: Lora | None = None  # adapters beside its projections, which are then frozen
    # Of a decoder that transformers computes: config.json without what changes no layer, the shape
    # of every parameter, and the projections of its layers.
    implementation: Literal["native", "transformers", "torchtune"] = "native"
    fields: str = ""
    shapes: Shapes = ()
    linears: tuple[str, ...] = ()
    buffers: Shapes = ()  # that a directory holds beside them
    # Of parts that are no decoder, such as one that reads images. Exports have them too.
    carried: Shapes = ()
    # Its layers carry a state from token to token beside attention, which would leak from one
    # packed sequence into the next. Each is read by itself, and again for each new token.
    is_read_alone: bool = False
    # How tensor-parallel ranks share its layers, by transformers' plan: names of modules, with * in
    # the place of numbers, and the kind of each. Where they share heads, all counts of these are
    # multiples of split_heads; 0: each rank has all heads.
    plan: tuple[tuple[str, str], ...] = ()
    split_heads: int = 0
    unsplit: str = ""  # why they cannot share them, whatever their number
    builder: str = ""  # the import path of what makes torchtune's modules

    @property
    def family(self) -> str:
        """The family's name: Llama for LlamaForCausalLM and for LlamaForSequenceClassification."""
        return family_of(self.architecture)

    @property
    def traits(self) -> Family:
        """The traits that all models of the family have in common; Llama's of one that only
        transformers knows.
        """
        return FAMILIES.get(self.family, FAMILIES["Llama"])


def family_of(architecture: str) -> str:
    """Return the part of an architecture's name before the name of its head."""
    return architecture.removesuffix(SCORER).removesuffix(CAUSAL)
