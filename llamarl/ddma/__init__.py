"""DDMA: weights from the trainer's shards straight into the generators' memory. layout -> plan ->
transfer.
"""
