"""The end of a socket that listens, without a reset of connections that wait in it."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import sys

# Of Linux, asm-generic/socket.h; Python does not name it.
_SO_ATTACH_FILTER = 26

# A filter of packets, linux/filter.h: code, jumps if true and false, operand. What it sees begins
# with the header of TCP, whose byte 13 holds the flags SYN (0x02) and ACK (0x10).
_DROP_OPENING_PACKETS = (
    (0x30, 0, 0, 13),  # load a byte
    (0x54, 0, 0, 0x12),  # and
    (0x15, 0, 1, 0x02),  # equal?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep
)


def open_no_more(listener: socket.socket) -> bool:
    """Let no new connection begin; those that have begun can still be accepted.

    The system completes connections by itself, and resets those that nobody has accepted when their
    listener is closed: there is always a moment between the last accept and the end. So opening
    packets are dropped first. Their senders repeat them a second later, and are refused then.

    Returns:
        Whether the system can do that: Linux can.
    """
    if not sys.platform.startswith("linux"):
        return False
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *each) for each in _DROP_OPENING_PACKETS)
    )
    program = struct.pack("HP", len(_DROP_OPENING_PACKETS), ctypes.addressof(code))
    with contextlib.suppress(OSError):  # a sandbox may not have it
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        return True
    return False
