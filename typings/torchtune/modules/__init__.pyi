"""What llamarl takes of torchtune, which has annotations and does not say so (no py.typed)."""

from torch import nn

class TransformerDecoder(nn.Module):
    tok_embeddings: nn.Embedding
    layers: nn.ModuleList
    norm: nn.Module
    output: nn.Module
    def __init__(
        self,
        *,
        tok_embeddings: nn.Embedding,
        layers: list[nn.Module],
        max_seq_len: int,
        num_heads: int,
        head_dim: int,
        norm: nn.Module,
        output: nn.Module,
    ) -> None: ...
