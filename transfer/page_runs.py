"""Which bytes of one buffer in a sender's slot are which bytes of the same buffer at a receiver.

A page is ``[heads, tokens, elements]``, so that the tokens of one head that lie in one page on both
ends are one run, whatever the page sizes. A sectioned page is a row of sections, each cut by
itself. Both views are of one layer and role, and ``check_peer`` has passed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from transfer.rank_info import PageView
from transfer.sharding import num_shards, shard_index


@dataclass(frozen=True, slots=True)
class PageRun:
    """A run of bytes, counted from the buffer's offset in the slot on either end."""

    sender_bytes: int
    receiver_bytes: int
    size_bytes: int


def page_runs(source: PageView, target: PageView) -> Iterator[PageRun]:
    """Runs of one buffer of ``target`` that the rank of ``source`` holds."""
    if _same_pages(source, target):
        # All of it, padding between pages too, so that whole slots show as whole.
        yield PageRun(0, 0, target.page_stride_bytes * target.pages_per_block)
    elif target.mapping == "sectioned":
        for cut in section_cuts(source, target):
            yield PageRun(cut.sender_bits // 8, cut.receiver_bits // 8, cut.size_bits // 8)
    else:
        yield from _head_runs(source, target)


def _same_pages(source: PageView, target: PageView) -> bool:
    return (
        source.num_heads == target.num_heads
        and num_shards(source) == num_shards(target)
        and shard_index(source) == shard_index(target)
        and source.sections == target.sections
        and source.tokens_per_page == target.tokens_per_page
        and source.page_stride_bytes == target.page_stride_bytes
    )


def _head_runs(source: PageView, target: PageView) -> Iterator[PageRun]:
    first = max(source.first_head, target.first_head)
    end = min(source.first_head + source.num_heads, target.first_head + target.num_heads)
    sender_tokens, receiver_tokens = rows_per_head(source), rows_per_head(target)
    run_tokens = gcd(sender_tokens, receiver_tokens)
    # Where pages hold the same tokens, neighbouring heads are neighbours on both ends.
    run_heads = max(end - first, 1) if sender_tokens == receiver_tokens else 1
    for token in range(0, receiver_tokens * target.pages_per_block, run_tokens):
        for head in range(first, end, run_heads):
            yield PageRun(
                _row_offset_bytes(source, head, token),
                _row_offset_bytes(target, head, token),
                run_heads * run_tokens * row_bytes(target),
            )


def _row_offset_bytes(view: PageView, head: int, token: int) -> int:
    page, row = divmod(token, rows_per_head(view))
    rows = (head - view.first_head) * rows_per_head(view) + row
    return page * view.page_stride_bytes + rows * row_bytes(view)


def rows_per_head(view: PageView) -> int:
    """Rows of one head in a page: its tokens, or the one row of a state."""
    return max(view.tokens_per_page, 1)


def row_bytes(view: PageView) -> int:
    """Bytes of one token of one head."""
    return view.page_bytes // (view.num_heads * rows_per_head(view))


def element_bits(view: PageView) -> int:
    """Bits of one element."""
    elements = view.num_heads * rows_per_head(view) * view.elements_per_head
    return view.page_bytes * 8 // elements


@dataclass(frozen=True, slots=True)
class SectionCut:
    """Elements of one section held on both ends, in bits: elements may be smaller than a byte."""

    sender_bits: int
    receiver_bits: int
    size_bits: int

    @property
    def whole_bytes(self) -> bool:
        """Whether the cut starts and ends between bytes on both ends."""
        return not (self.sender_bits % 8 or self.receiver_bits % 8 or self.size_bits % 8)


def section_cuts(source: PageView, target: PageView) -> Iterator[SectionCut]:
    """What two sectioned pages have in common, section by section."""
    bits = element_bits(target)
    sender_start = receiver_start = 0
    for sender_size, receiver_size in zip(source.sections, target.sections, strict=True):
        sender_first = shard_index(source) * sender_size
        receiver_first = shard_index(target) * receiver_size
        first = max(sender_first, receiver_first)
        end = min(sender_first + sender_size, receiver_first + receiver_size)
        if first < end:
            yield SectionCut(
                (sender_start + first - sender_first) * bits,
                (receiver_start + first - receiver_first) * bits,
                (end - first) * bits,
            )
        sender_start += sender_size
        receiver_start += receiver_size


def splits_bytes(source: PageView, target: PageView) -> bool:
    """Whether sections of elements smaller than a byte would have to be cut within one."""
    if target.mapping != "sectioned" or _same_pages(source, target):
        return False
    return not all(cut.whole_bytes for cut in section_cuts(source, target))
