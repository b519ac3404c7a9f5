"""How a layer's keys and values become the numbers that its pages hold, and numbers again.

Pages in the model's type hold them as they are. float8 pages hold ``x / scale``, rounded to the
nearest and saturated; whoever reads multiplies by the same scale. What was stored is what every
later step sees, so attention over rows that are still at hand rounds them first.
"""

from __future__ import annotations

from typing import Final

import torch

from worker.model.errors import AttentionInputError

FLOAT8: Final = torch.float8_e4m3fn
FLOAT8_LIMIT: Final = torch.finfo(FLOAT8).max
UNQUANTISED: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What models compute in."""
NAMES: Final = "float32, float16, bfloat16 or float8_e4m3fn"


class PageNumbers:
    """The numbers of one layer.

    ``scales``, float32 ``[2, num_kv_heads]`` on the pages' device, multiply stored keys and values;
    float8 pages have them, others do not.
    """

    def __init__(self, pages: torch.Tensor, num_kv_heads: int, scales: torch.Tensor | None) -> None:
        """Raises AttentionInputError: type, scales or their device do not fit the pages."""
        if pages.dtype not in UNQUANTISED | {FLOAT8}:
            raise AttentionInputError(f"expected pages in {NAMES}, got {pages.dtype}")
        _check_scales(pages, num_kv_heads, scales)
        self.dtype = pages.dtype
        self.device = pages.device
        self.scales = scales

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[..., 2, num_kv_heads, head_dim]`` as pages hold them."""
        if self.scales is None:
            return rows
        scaled = rows.float() / self.scales[..., None]
        return scaled.clamp_(-FLOAT8_LIMIT, FLOAT8_LIMIT).to(FLOAT8)

    def seen(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What attention in ``dtype`` sees of stored rows of that shape."""
        if self.scales is None:
            return stored
        return (stored.float() * self.scales[..., None]).to(dtype)

    def check(self, name: str, rows: torch.Tensor, dtype: torch.dtype) -> None:
        """Check new rows, or a query, of a step that computes in ``dtype``.

        Raises:
            AttentionInputError: type, device or strides do not fit.
        """
        fitting = UNQUANTISED if self.dtype == FLOAT8 else {self.dtype}
        if rows.dtype != dtype or dtype not in fitting or rows.device != self.device:
            wanted = dtype if dtype in fitting else self.dtype
            raise AttentionInputError(
                f"expected {name} in {wanted} on {self.device} for pages in {self.dtype}, "
                f"got {rows.dtype} on {rows.device}"
            )
        if rows.stride(-1) != 1:
            raise AttentionInputError(
                f"expected contiguous {name} vectors, got strides {rows.stride()}"
            )


def _check_scales(pages: torch.Tensor, num_kv_heads: int, scales: torch.Tensor | None) -> None:
    if scales is None:
        if pages.dtype == FLOAT8:
            raise AttentionInputError(
                f"expected scales float32 [2, {num_kv_heads}] with pages in {FLOAT8}, got none"
            )
        return
    fits = (
        scales.dtype == torch.float32
        and scales.shape == (2, num_kv_heads)
        and scales.is_contiguous()
        and scales.device == pages.device
    )
    if pages.dtype != FLOAT8 or not fits:
        raise AttentionInputError(
            f"expected contiguous float32 scales [2, {num_kv_heads}] on {pages.device} for pages "
            f"in {FLOAT8}, got {scales.dtype} {list(scales.shape)} on {scales.device} for "
            f"{pages.dtype}"
        )
