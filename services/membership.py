"""Frames that the launcher writes to a front end's standard input.

The first frame is ``FrontEndSettings``, every later one a whole ``MembershipUpdate``: the live
workers, not a difference, so that a lost or repeated frame can do no harm. The end of the input
means: shut down. Loads no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from router.rules import LoadRule, NewConversationFollow
from transfer.wire import Codec, Message
from worker.config import WorkerAddress


class FrontEndSettings(Message):
    """Everything a front end needs to know, once."""

    kind: Literal["settings"] = "settings"
    model: str
    """Name of the model in the API."""
    tokenizer_directory: str
    """Written by ``python -m worker.model.export_tokenizer``."""
    listen_fd: int | None
    """Inherited, bound socket; it outlives a front end that crashes. None: bind ``host:port``."""
    host: str
    port: int
    cluster_token: str = Field(repr=False)
    expected_instances: tuple[str, ...]
    """Not ready before all of these have been seen."""
    request_timeout_ms: int
    drain_timeout_ms: int
    log_level: str
    load_rule: str = LoadRule.ESTIMATED.value
    new_conversation_follow: str = NewConversationFollow.SPECIFIC.value
    max_in_flight: int = 512


class MembershipUpdate(Message):
    """The live workers of the cluster."""

    kind: Literal["membership"] = "membership"
    workers: tuple[WorkerAddress, ...]


LauncherMessage = Annotated[FrontEndSettings | MembershipUpdate, Field(discriminator="kind")]
LAUNCHER_CODEC: Codec[FrontEndSettings | MembershipUpdate] = Codec(LauncherMessage)
"""Launcher to front end."""
