"""llamarl: asynchronous RL post-training of LLMs in native PyTorch. Importing it imports no torch."""

__version__ = "0.1.0"
