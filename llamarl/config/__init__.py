"""From a command line to a checked configuration. Importing it imports no torch."""

from llamarl.config.recipe import main
from llamarl.config.schema import Config

__all__ = ["Config", "main"]
