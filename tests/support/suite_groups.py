"""What the processes of the suite share out among them, and in which order.

The long group comes first and whole services last, so that little else runs beside them: they tell
processes dead by their silence.
"""

from __future__ import annotations

from typing import Final

from typing_extensions import override
from xdist.scheduler import LoadScopeScheduling

FIRST: Final = ("tests/contracts/test_transport.py", "tests/transfer/test_ucx_")
LAST: Final = ("tests/e2e/",)
NOT_LAST: Final = ("tests/e2e/test_host_tier.py", "tests/e2e/test_prefix_pull.py")
"""Worker processes of tiny models like those of ``tests/worker/test_host.py``; no launched service,
nothing that is timed.
"""


def turn(node_id: str) -> int:
    """When the group of this test begins."""
    if node_id.startswith(FIRST):
        return 0
    return 2 if node_id.startswith(LAST) and not node_id.startswith(NOT_LAST) else 1


def group(node_id: str) -> str:
    """Tests of a group run in one process, one after the other: those of UCX, those of whole
    services, and else those of a module.
    """
    return ("ucx", node_id.partition("::")[0], "services")[turn(node_id)]


class GroupScheduling(LoadScopeScheduling):
    """Shares out groups."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
