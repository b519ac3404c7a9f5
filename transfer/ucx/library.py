"""The loaded UCX library: ucxx's core API and the three calls that it lacks.

ucxx cancels a request only by destroying it, which hides whether UCX is still writing; it does not
tell which transports an endpoint uses; and an endpoint closed with requests under way keeps them
after their end, and they keep it, with its worker, for ever. All three calls exist in the libraries
it loads, so they are made through ctypes: those of ucxx where the C++ symbol is exported, the query
from the UCX version on that has it. Where one is missing, cancelling does nothing (requests run to
their end, or end with their endpoint), lanes read ``unknown``, and such an endpoint stays.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from transfer.transport import TransportError
from transfer.ucx.settings import apply_to_process

STATUS_OK: Final = 0
STATUS_CANCELED: Final = -16
MIN_QUERY_VERSION: Final = (1, 12, 0)
MAX_LANES: Final = 32
CANCEL_SYMBOL: Final = "_ZN4ucxx7Request6cancelEv"
CANCELING_SYMBOL: Final = "_ZNK4ucxx8Endpoint16getCancelingSizeEv"


class _TransportEntry(ctypes.Structure):
    """``ucp_transport_entry_t``."""

    _fields_ = (("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    """``ucp_transports_t``."""

    _fields_ = (
        ("entries", ctypes.POINTER(_TransportEntry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _EndpointAttributes(ctypes.Structure):
    """``ucp_ep_attr_t``."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_byte * 128),
        ("remote_sockaddr", ctypes.c_byte * 128),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


_FIELD_TRANSPORTS: Final = 1 << 3


class LaneDevice(NamedTuple):
    """What one lane of an endpoint runs over; ``device`` is empty where it is the connection."""

    transport: str
    device: str


UNKNOWN_LANES: Final = (LaneDevice("unknown", ""),)


@dataclass(frozen=True)
class Library:
    """Names of ucxx that the driver uses, untyped, and the ctypes calls."""

    api: Any
    """Module ``ucxx._lib.libucxx``."""
    array: Any
    """Class ``ucxx._lib.arr.Array``: a view of an object's memory."""
    tag: Any
    """Class ``ucxx.types.Tag``."""
    any_tag: Any
    """The mask that every tag fits."""
    error: type[Exception]
    version: tuple[int, int, int]
    path: str
    cancel: Callable[[Any], None]
    """Ask a ucxx request to cancel; it stays valid and still has to complete."""
    canceling: Callable[[Any], int]
    """How many requests a closed ucxx endpoint still waits for; it forgets those that have ended.
    """
    use_cuda_device: Callable[[int], None]
    """Make a device's context current in the calling thread."""
    lane_devices: Callable[[Any], tuple[LaneDevice, ...]]
    """Every lane of a live ucxx endpoint."""

    def lanes(self, endpoint: Any) -> tuple[str, ...]:
        """Transport names of a live ucxx endpoint, without repetition."""
        return tuple(dict.fromkeys(lane.transport for lane in self.lane_devices(endpoint)))


def mapped_file(name: str) -> str:
    """Path of the mapped file whose name holds ``name``; empty when there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and name in Path(fields[5]).name:
            return fields[5]
    return ""


def load() -> Library:
    """Apply the settings, then import ucxx. Raises TransportError when it cannot be loaded."""
    apply_to_process()
    try:
        import ucxx
        from ucxx._cuda_context import ensure_cuda_context
        from ucxx._lib import libucxx as api
        from ucxx._lib.arr import Array
        from ucxx.types import Tag, TagMask
    except ImportError as error:
        raise TransportError(
            f"UCX cannot be loaded: {error}; install ucxx-cu13 (or ucxx-cu12 on a CUDA 12 host)"
        ) from error
    version = tuple(int(part) for part in api.get_ucx_version())
    path = mapped_file("libucp.so")
    ucxx_path = mapped_file("libucxx.so")
    return Library(
        api=api,
        array=Array,
        tag=Tag,
        any_tag=TagMask(0),
        error=ucxx.exceptions.UCXError,
        version=(version[0], version[1], version[2]),
        path=path,
        use_cuda_device=ensure_cuda_context,
        cancel=_cancel_call(ucxx_path),
        canceling=_canceling_call(ucxx_path),
        lane_devices=_lane_devices_call(path, version),
    )


def available_transports(context_info: str) -> tuple[str, ...]:
    """Names in ``UCXContext.info``, whose resource lines end in ``-- transport/device``."""
    found = re.findall(r"--\s+(\w+)/", context_info)
    return tuple(dict.fromkeys(found))


def _cancel_call(path: str) -> Callable[[Any], None]:
    if not path:
        return _cancel_nothing
    try:
        call = ctypes.CDLL(path)[CANCEL_SYMBOL]
    except AttributeError:
        return _cancel_nothing
    call.argtypes = (ctypes.c_void_p,)
    call.restype = None

    def cancel(request: Any) -> None:
        call(request.ucxx_ptr)

    return cancel


def _cancel_nothing(request: Any) -> None:
    """Leave the request to its natural end."""


def _canceling_call(path: str) -> Callable[[Any], int]:
    if not path:
        return _canceling_none
    try:
        call = ctypes.CDLL(path)[CANCELING_SYMBOL]
    except AttributeError:
        return _canceling_none
    call.argtypes = (ctypes.c_void_p,)
    call.restype = ctypes.c_size_t

    def canceling(endpoint: Any) -> int:
        return int(call(endpoint.ucxx_ptr))

    return canceling


def _canceling_none(endpoint: Any) -> int:
    """Nothing that could be waited for."""
    return 0


def _lane_devices_call(
    path: str, version: tuple[int, ...]
) -> Callable[[Any], tuple[LaneDevice, ...]]:
    if not path or version < MIN_QUERY_VERSION:
        return _lanes_unknown
    query = ctypes.CDLL(path)["ucp_ep_query"]
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes))
    query.restype = ctypes.c_int

    def lane_devices(endpoint: Any) -> tuple[LaneDevice, ...]:
        entries = (_TransportEntry * MAX_LANES)()
        attributes = _EndpointAttributes(field_mask=_FIELD_TRANSPORTS)
        attributes.transports.entries = entries
        attributes.transports.num_entries = MAX_LANES
        attributes.transports.entry_size = ctypes.sizeof(_TransportEntry)
        if query(endpoint.handle, ctypes.byref(attributes)) != STATUS_OK:
            return UNKNOWN_LANES
        return tuple(
            LaneDevice(_text(entry.transport_name), _text(entry.device_name))
            for entry in entries[: attributes.transports.num_entries]
        )

    return lane_devices


def _text(name: bytes | None) -> str:
    return "" if name is None else name.decode()


def _lanes_unknown(endpoint: Any) -> tuple[LaneDevice, ...]:
    return UNKNOWN_LANES
