"""Between ranks: who is there, what they tell each other, and the channels that records go through."""
