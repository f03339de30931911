"""Inference: continuous batching over the same decoder that is trained. `from llamarl.inference.engine import Engine`."""
