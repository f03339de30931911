"""The ways in which four ranks may share a model."""

WORLD = 4
TOPOLOGIES = {  # replicate, tensor_parallel; the rest are shards
    "fsdp4": (1, 1),
    "hsdp2x2": (2, 1),
    "replicas4": (4, 1),
    "fsdp2_tp2": (1, 2),
    "hsdp2_tp2": (2, 2),
    "tp4": (1, 4),
}
