"""Checkpoints: what a run needs on disk to go on."""
