"""From a command line to a checked configuration. Importing it imports no torch."""

from llamarl.config.command_line import Config, main

__all__ = ["Config", "main"]
