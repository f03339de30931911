"""Sizes up to which logits are kept, or cut into chunks. No torch: memory is priced by it."""

# Up to this many logits are one chunk, kept for backward: recomputing them would cost more than it
# saves.
KEEP_LOGITS = 1 << 22
CHUNK_TOKENS = 1024  # rows of logits at a time
# Up to this many bytes they are kept for backward, though chunks are smaller.
KEEP_BYTES = 1 << 26
