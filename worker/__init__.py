"""One model instance: engine, scheduler, model, sampling, messages to front ends, Ray shell."""
