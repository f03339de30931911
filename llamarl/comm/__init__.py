"""Communication between ranks: who is there, what they tell each other, and the channels of
records.
"""

from llamarl.comm.channel import Broadcast, Gather, Scatter

__all__ = ["Broadcast", "Gather", "Scatter"]
