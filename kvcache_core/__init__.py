"""KV cache of one rank: layer specs, layout plan, prefix tree, pages and the unified target+draft manager."""
