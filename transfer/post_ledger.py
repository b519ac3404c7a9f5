"""Which posted requests may still touch which lease: the access half of a session.

A lease is held, posted against, and *retired* when nothing more will be posted against it. It ends
when it is retired and each of its posts has ended cleanly, or when the peer is known dead. It is
in doubt when the peer is lost, not known dead, and a post went down with the endpoint. The ledger
knows no time: nothing here ends because something took long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from transfer.lease import LeasedBlocks, TransferLease
from transfer.outcome import Access, PeerFate, PostStatus
from transfer.region import Piece, Post


@dataclass(eq=False)
class _Account:
    """One lease. ``open`` posts have not ended; ``lost`` ones ended with their endpoint."""

    blocks: LeasedBlocks
    open: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    posted: int = 0
    retired: bool = False
    access: Access = Access.NOT_SUBMITTED


class PostLedger:
    """Posts and leases of one session."""

    def __init__(self) -> None:
        self._accounts: list[_Account] = []
        self._by_post: dict[int, _Account] = {}
        self._bytes: dict[int, int] = {}
        self._open_bytes = 0
        self._posted_bytes = 0
        self._moved_bytes = 0
        self._next_post = 0

    @property
    def open_posts(self) -> int:
        """Posts that have not ended."""
        return len(self._bytes)

    @property
    def open_bytes(self) -> int:
        """Bytes of the posts that have not ended."""
        return self._open_bytes

    @property
    def posted_bytes(self) -> int:
        """Bytes of all posts ever made."""
        return self._posted_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes of the posts that ended DONE."""
        return self._moved_bytes

    @property
    def access(self) -> Access:
        """The worst over all leases: in doubt, in flight, ended, not submitted."""
        found = {account.access for account in self._accounts}
        for access in (Access.IN_DOUBT, Access.IN_FLIGHT, Access.ENDED):
            if access in found:
                return access
        return Access.NOT_SUBMITTED

    @property
    def settled(self) -> bool:
        """Whether every lease held so far has been given back."""
        return not self._accounts

    @property
    def doubtful(self) -> bool:
        """Whether what is left is only leases in doubt."""
        return bool(self._accounts) and all(
            account.access is Access.IN_DOUBT for account in self._accounts
        )

    def hold(self, blocks: LeasedBlocks) -> TransferLease:
        """Take a lease into the books. Raises ValueError when it is held already."""
        if any(account.blocks.lease is blocks.lease for account in self._accounts):
            raise ValueError("expected a lease that this session does not hold yet; give each once")
        self._accounts.append(_Account(blocks))
        return blocks.lease

    def post(self, lease: TransferLease, pieces: Iterable[tuple[Piece, int]]) -> tuple[Post, ...]:
        """Number posts of ``(piece, bytes)`` against a held lease."""
        account = self._account(lease)
        posts = []
        for piece, size_bytes in pieces:
            post = Post(self._next_post, piece, size_bytes)
            self._next_post += 1
            self._by_post[post.id] = account
            self._bytes[post.id] = size_bytes
            self._open_bytes += size_bytes
            self._posted_bytes += size_bytes
            account.open.add(post.id)
            account.posted += 1
            account.access = Access.IN_FLIGHT
            posts.append(post)
        return tuple(posts)

    def end(self, post: int, status: PostStatus) -> None:
        """Book the end of a post. Raises ValueError for one never made or ended before."""
        account = self._by_post.get(post)
        if account is None or (post not in account.open and post not in account.lost):
            raise ValueError(f"post {post} is not open; report the end of each post once")
        size_bytes = self._bytes.pop(post, 0)
        self._open_bytes -= size_bytes
        account.open.discard(post)
        account.lost.discard(post)
        match status:
            case PostStatus.DONE:
                self._moved_bytes += size_bytes
            case PostStatus.REVOKED:
                pass
            case PostStatus.LOST:
                account.lost.add(post)

    def retire(self, lease: TransferLease) -> None:
        """Nothing more will be posted against this lease."""
        self._account(lease).retired = True

    def retire_all(self) -> None:
        """Nothing more will be posted."""
        for account in self._accounts:
            account.retired = True

    def give_up(self) -> None:
        """Count every open post as lost: its end is not waited for any more, only proved."""
        for account in self._accounts:
            account.lost |= account.open
            account.open.clear()
        self._bytes.clear()
        self._open_bytes = 0

    def settle(self, fate: PeerFate | None) -> Iterator[tuple[TransferLease, Access]]:
        """Leases whose access has become ENDED or IN_DOUBT, each told once. None: peer connected.

        Nothing was submitted against a lease that never had a post: it is told as ENDED too.
        """
        for account in tuple(self._accounts):
            if not account.retired:
                continue
            if fate is PeerFate.DEAD or not (account.open or account.lost):
                self._forget(account)
                account.access = Access.ENDED
                yield account.blocks.lease, Access.ENDED
            elif (
                fate is PeerFate.UNKNOWN
                and not account.open
                and account.access is not Access.IN_DOUBT
            ):
                account.access = Access.IN_DOUBT
                yield account.blocks.lease, Access.IN_DOUBT

    def _forget(self, account: _Account) -> None:
        for post in account.open | account.lost:
            self._open_bytes -= self._bytes.pop(post, 0)
        account.open.clear()
        account.lost.clear()
        self._accounts.remove(account)

    def _account(self, lease: TransferLease) -> _Account:
        for account in self._accounts:
            if account.blocks.lease is lease:
                return account
        raise ValueError("this session does not hold that lease")
