"""DDMA: weights from the trainer's shards straight into the generators' memory.

channel    Weights, which a recipe declares; connects the others
sender     the trainer rank's end, and its copies of a shard into the slots
receiver   the generator rank's end; forwarder: how it sends on to another replica
route      who sends what to whom, and by which transport, made from both sides: layout (who holds
           what), plan (what crosses)
protocol   what both ends say to each other about a version
payload    regions in buckets, and how these are copied and digested
links      how bytes and headers get from one rank to another
"""
