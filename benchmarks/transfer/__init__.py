"""``python -m benchmarks.transfer``: pages of prompts between the ranks of two instances, against
one raw UCX message of the same bytes between the same processes.

Each rank is a process with pools, a transfer agent and a UCX transport, as in a worker; no model
computes. A case is (tokens, tp, streams, way, prefill beside it). Its rounds take turns: one copy
within a process's memory, the raw messages, the pages. What is timed of pages is a request from the
moment its pages are allocated to the moment every generation rank has the first token.

Ways: ``default`` is equal pages and neighbouring slots; ``staged`` gives the generation ranks
smaller kernel pages, so that all is scattered; ``fragmented`` gives them no two neighbouring slots.
Each round of pages counts its passes over the bytes, beside the message, by what the agents copied;
the bound of a case is ``raw + passes * bytes / copy bandwidth``. With several ranks on a side the
raw message is one of an equal share for each pair of ranks, all at once.

Pipelining: a prompt is shipped chunk by chunk while a prefill computes, each chunk for twice as
long as it travels; what is left behind the last chunk, over the time of all of it at once.

With several GPUs each instance has its own half of them, whose ranks take them in turn.

Bytes are compared in a round of their own. Streams share slots where the pools, as large as the
longest prompt, cannot hold them apart (``apart`` in the result). A run on a CPU is void, and exits
with 1, when a raw message from 8k tokens on was under 2 GB/s; a run with a connection that is not
over shared memory (or CUDA IPC) fails at once. The longest prompts are not measured beside a
prefill unless ``--beside-prefill`` names them.
"""
