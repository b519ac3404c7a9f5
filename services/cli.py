"""The command line. Only what parses arguments is imported here; each command imports what it needs
when it runs.

User errors end with one line and exit code 2 (wrong usage) or 1 (something failed); a traceback
means a bug.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from services.errors import EXIT_INTERRUPTED, CommandError

app = typer.Typer(
    help="Disaggregated LLM serving: context and generation workers that ferry KV cache pages.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

CAPACITY: Final = "Capacity"
CLUSTER: Final = "Cluster"
ROUTING: Final = "Routing"
TIMEOUTS: Final = "Deadlines (500ms, 90s, 10m)"

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Hugging Face directory or GGUF file. Default: SmolLM2-135M-Instruct, fetched once.",
        show_default=False,
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option("--context", help="Context instances (default: 1).", rich_help_panel=CLUSTER),
]
GenerationOption = Annotated[
    int | None,
    typer.Option(
        "--generation", help="Generation instances (default: 1).", rich_help_panel=CLUSTER
    ),
]
AggregatedOption = Annotated[
    int | None,
    typer.Option(
        "--aggregated",
        metavar="[N]",
        help="N (or 1) instances that do both phases, instead of the two roles.",
        rich_help_panel=CLUSTER,
    ),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size",
        help="Ranks of each instance, a GPU each (default: 1).",
        rich_help_panel=CLUSTER,
    ),
]
ContextRanksOption = Annotated[
    int | None,
    typer.Option(
        help="Of context instances (default: as all).",
        rich_help_panel=CLUSTER,
    ),
]
GenerationRanksOption = Annotated[
    int | None,
    typer.Option(
        help="Of generation instances (default: as all).",
        rich_help_panel=CLUSTER,
    ),
]
DpOption = Annotated[
    int | None,
    typer.Option(
        "--attention-dp-size",
        help="Ranks of each instance with whole attention and requests of their own; they share "
        "MLPs (default: 1).",
        rich_help_panel=CLUSTER,
    ),
]
ContextDpOption = Annotated[
    int | None,
    typer.Option(
        help="Of context instances (default: as all).",
        rich_help_panel=CLUSTER,
    ),
]
GenerationDpOption = Annotated[
    int | None,
    typer.Option(
        help="Of generation instances (default: as all).",
        rich_help_panel=CLUSTER,
    ),
]
DpAdmissionOption = Annotated[
    str | None,
    typer.Option(
        help="How requests come to such ranks: in_order or kv_balanced (default: in_order).",
        rich_help_panel=CLUSTER,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file; its keys are these options. Options win over it."),
]
HostOption = Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")]
PortOption = Annotated[
    int | None, typer.Option(help="Port to listen on; 0: a free one (default: 8000).")
]
NameOption = Annotated[str | None, typer.Option(help="Name of the model in the API.")]
RayOption = Annotated[
    str | None,
    typer.Option(
        help="Join this Ray cluster (auto or host:port) instead of a private Ray.",
        rich_help_panel=CLUSTER,
    ),
]
ClusterNameOption = Annotated[
    str | None,
    typer.Option(help="Scope of the actors' names in a shared Ray.", rich_help_panel=CLUSTER),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="auto, cpu or cuda (default: auto).", rich_help_panel=CAPACITY)
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="auto, float32, bfloat16 or float16, also fp32, bf16, fp16 (default: auto).",
        rich_help_panel=CAPACITY,
    ),
]
KVDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-dtype",
        help="Of cached keys and values: auto (the model's), fp8, or the model's by name "
        "(default: auto).",
        rich_help_panel=CAPACITY,
    ),
]
ThreadsOption = Annotated[
    str | None,
    typer.Option(help="Threads of an instance (default: cores shared).", rich_help_panel=CAPACITY),
]
CacheOption = Annotated[
    str | None,
    typer.Option(
        help="KV cache of an instance, such as 512MiB (default: a share of free memory).",
        rich_help_panel=CAPACITY,
    ),
]
FractionOption = Annotated[
    float | None,
    typer.Option(
        help="KV cache of an instance on a GPU, as a share of what is free beside weights, a step "
        "and transfers (default: 0.9).",
        rich_help_panel=CAPACITY,
    ),
]
HostCacheOption = Annotated[
    str | None,
    typer.Option(
        help="Host memory of an instance for KV pages its cache has no room for (default: none).",
        rich_help_panel=CAPACITY,
    ),
]
BlockOption = Annotated[
    int | None,
    typer.Option(help="Tokens of a cache block (default: 64).", rich_help_panel=CAPACITY),
]
SequenceOption = Annotated[
    str | None,
    typer.Option(
        help="Longest prompt plus output (default: the model's limit).", rich_help_panel=CAPACITY
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens of one step (default: 2048 on a GPU, 512 on a CPU).", rich_help_panel=CAPACITY
    ),
]
RunningOption = Annotated[
    int | None,
    typer.Option(
        help="Sequences of one step (default: 256 on a GPU, 64 on a CPU).", rich_help_panel=CAPACITY
    ),
]
GraphsOption = Annotated[
    bool | None,
    typer.Option(
        "--decode-graphs/--no-decode-graphs",
        help="Decode in CUDA graphs (default: where device and model have them).",
        rich_help_panel=CAPACITY,
    ),
]
UnderWayOption = Annotated[
    int | None,
    typer.Option(
        "--steps-under-way",
        help="2: a step begins before the last one's results are seen (default: on a GPU).",
        rich_help_panel=CAPACITY,
    ),
]
DemotionOption = Annotated[
    int | None,
    typer.Option(
        help="Prompts that lack more tokens than this let others go first for a while "
        "(default: none does).",
        rich_help_panel=CAPACITY,
    ),
]
DemotionStepsOption = Annotated[
    int | None,
    typer.Option(help="Steps for which they do (default: 8).", rich_help_panel=CAPACITY),
]
HooksOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:ATTRIBUTE",
        help="What the model declares about its run: a RuntimeHooks that workers can import "
        "(default: nothing).",
        rich_help_panel=CAPACITY,
    ),
]
TransportOption = Annotated[
    str | None,
    typer.Option(
        help="Refuse to start without this transport, such as shm, rdma or cuda_ipc.",
        rich_help_panel=CAPACITY,
    ),
]
LoadRuleOption = Annotated[
    str | None,
    typer.Option(
        help="round_robin, least_backlog or estimated (default: estimated).",
        rich_help_panel=ROUTING,
    ),
]
FollowOption = Annotated[
    str | None,
    typer.Option(
        help="Prefixes that a new conversation follows: specific or always (default: specific).",
        rich_help_panel=ROUTING,
    ),
]
InFlightOption = Annotated[
    int | None,
    typer.Option(
        help="Requests beyond these are refused with 429 (default: 512).", rich_help_panel=ROUTING
    ),
]
RequestTimeoutOption = Annotated[
    str | None, typer.Option(help="Of a request (default: 10m).", rich_help_panel=TIMEOUTS)
]
TransferTimeoutOption = Annotated[
    str | None,
    typer.Option(help="Of a transfer, at least (default: 60s).", rich_help_panel=TIMEOUTS),
]
StartupTimeoutOption = Annotated[
    str | None,
    typer.Option(help="Of the start of an instance (default: 10m).", rich_help_panel=TIMEOUTS),
]
DrainTimeoutOption = Annotated[
    str | None,
    typer.Option(
        help="Of requests in flight when stopping (default: 10s).", rich_help_panel=TIMEOUTS
    ),
]
LogLevelOption = Annotated[
    str | None, typer.Option(help="debug, info, warning or error (default: info).")
]


@app.command()
def serve(  # noqa: PLR0913  one parameter an option is how typer works
    model: ModelArgument = None,
    context: ContextOption = None,
    generation: GenerationOption = None,
    aggregated: AggregatedOption = None,
    tensor_parallel_size: RanksOption = None,
    context_tensor_parallel_size: ContextRanksOption = None,
    generation_tensor_parallel_size: GenerationRanksOption = None,
    attention_dp_size: DpOption = None,
    context_attention_dp_size: ContextDpOption = None,
    generation_attention_dp_size: GenerationDpOption = None,
    dp_admission: DpAdmissionOption = None,
    host: HostOption = None,
    port: PortOption = None,
    config: ConfigOption = None,
    served_model_name: NameOption = None,
    ray_address: RayOption = None,
    cluster_name: ClusterNameOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    kv_cache_dtype: KVDtypeOption = None,
    torch_threads: ThreadsOption = None,
    kv_cache_bytes: CacheOption = None,
    kv_cache_fraction: FractionOption = None,
    host_cache_bytes: HostCacheOption = None,
    tokens_per_block: BlockOption = None,
    max_sequence_tokens: SequenceOption = None,
    max_batch_tokens: BatchOption = None,
    max_running: RunningOption = None,
    decode_graphs: GraphsOption = None,
    steps_under_way: UnderWayOption = None,
    ctx_demote_uncached_tokens: DemotionOption = None,
    ctx_demote_max_iters: DemotionStepsOption = None,
    runtime_hooks: HooksOption = None,
    require_transport: TransportOption = None,
    load_rule: LoadRuleOption = None,
    new_conversation_follow: FollowOption = None,
    max_in_flight: InFlightOption = None,
    request_timeout_ms: RequestTimeoutOption = None,
    transfer_timeout_ms: TransferTimeoutOption = None,
    startup_timeout_ms: StartupTimeoutOption = None,
    drain_timeout_ms: DrainTimeoutOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Serve a model behind an OpenAI-style endpoint until interrupted.

    The shared secret of the cluster comes from PAGEFERRY_CLUSTER_TOKEN or the configuration file,
    else it is minted.
    """
    flags = {key: value for key, value in locals().items() if key != "config" and value is not None}
    from services.commands import serve_command

    serve_command(flags, config)


@app.command()
def demo(
    model: ModelArgument = None,
    aggregated: AggregatedOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Serve on after the chat.")] = False,  # noqa: FBT002
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")] = 0,
) -> None:
    """Start a service, chat with it for three turns, and show what travelled and what was
    reused."""
    flags: dict[str, Any] = {"model": model, "aggregated": aggregated, "port": port}
    from services.commands import demo_command

    demo_command({key: value for key, value in flags.items() if value is not None}, keep=keep)


@app.command()
def doctor(
    port: Annotated[int, typer.Option(help="Port to check for `serve`.")] = 8000,
) -> None:
    """Check what this machine has: libraries, transports and their speed, memory, model, port."""
    from services.commands import doctor_command

    raise typer.Exit(doctor_command(port))


def _show_version(value: bool) -> None:  # noqa: FBT001  the signature of typer's callbacks
    if value:
        typer.echo(f"pageferry {importlib.metadata.version('pageferry')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the command."""


def with_optional_counts(arguments: Sequence[str]) -> list[str]:
    """``--aggregated`` alone stands for ``--aggregated 1``."""
    result: list[str] = []
    for position, argument in enumerate(arguments):
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        bare = argument == "--aggregated" and not following.isdecimal()
        result.append("--aggregated=1" if bare else argument)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``pageferry`` script."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        app(with_optional_counts(given), prog_name="pageferry")
    except CommandError as error:
        typer.echo(f"pageferry: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
