"""KV cache of one rank: specs, layout plan, prefix tree, pages, unified target+draft manager."""
