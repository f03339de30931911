"""From a configuration to a job that can run."""

from llamarl.launch.start import launch

__all__ = ["launch"]
