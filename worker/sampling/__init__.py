"""Drawing tokens from logits: penalties, filters, counter-based noise, log-probabilities."""

from worker.sampling.queued import QueuedDraws, queue_draws
from worker.sampling.rows import Sampled, SampleResult, SamplingFailed
from worker.sampling.sampler import sample

__all__ = [
    "QueuedDraws",
    "SampleResult",
    "Sampled",
    "SamplingFailed",
    "queue_draws",
    "sample",
]
