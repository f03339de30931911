"""The stations: generator, reward, reference, trainer. Each can be built and stepped alone."""
