"""One model instance: engine, scheduler, model, sampling, messages to front ends and the Ray actor shell."""
