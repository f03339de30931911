"""Communication between ranks: who is there, what they tell each other, and the channels of
records.
"""

from llamarl.comm.channel import Gather, Scatter

__all__ = ["Gather", "Scatter"]
