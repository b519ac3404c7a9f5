"""Drawing tokens from logits: penalties, filters, counter-based noise, log-probabilities."""

from worker.sampling.rows import Sampled, SampleRow, SamplingFailed
from worker.sampling.sampler import sample

__all__ = ["SampleRow", "Sampled", "SamplingFailed", "sample"]
