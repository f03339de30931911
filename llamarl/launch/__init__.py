"""From a configuration to a job that can run."""

from llamarl.launch.preferences import launch_preferences
from llamarl.launch.start import launch
from llamarl.launch.supervised import launch_supervised

__all__ = ["launch", "launch_preferences", "launch_supervised"]
