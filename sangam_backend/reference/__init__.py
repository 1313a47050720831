"""The plain loop: the oracle of the tests. It shares the model's weights with the engine, and
nothing of its batching, paging or unmasking."""

from sangam_backend.reference.loop import Predictor, generate
from sangam_backend.reference.sampler import Sampler, ServingSampler, View

__all__ = ["Predictor", "Sampler", "ServingSampler", "View", "generate"]
