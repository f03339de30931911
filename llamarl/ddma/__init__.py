"""DDMA: weights from the trainer's shards straight into the generators' memory.

channel    Weights, which a recipe declares; connects the others
sender     the trainer rank's end; staging: what it copies into its slots
receiver   the generator rank's end; forwarder: how it sends on to another replica
route      who sends what to whom, made from both sides: layout (who holds what), plan (what
           crosses), transports (by which way)
protocol   what both ends say to each other about a version
payload    what travels: regions in buckets; copies: how they are copied and digested
links      how bytes and words get from one rank to another
"""
