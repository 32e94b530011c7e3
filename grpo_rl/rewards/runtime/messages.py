"""Messages between the run and its reward and environment processes: a length of four bytes, then JSON.

JSON and not pickle: reading the output of a process that has run a user's code must not run any code.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!I")
LONGEST_ANSWER = 64 * 2**20
"""Bytes of a message from a reward process; more is no reward."""


def encode(message: Any) -> bytes:
    """The message as JSON. Raises ValueError or TypeError for what is no plain data."""
    try:
        return json.dumps(message, default=_plain).encode("ascii")
    except RecursionError as error:
        raise ValueError("it is nested too deep to be sent") from error


def frame(body: bytes) -> bytes:
    """The body with its length before it."""
    return LENGTH.pack(len(body)) + body


def decode(body: bytes | bytearray) -> Any:
    """The message in a body. Raises ValueError for anything but JSON."""
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deep to be read") from error


def receive(channel: socket.socket) -> Any:
    """The next message of a blocking channel; None once the other side is gone."""
    head = _exactly(channel, LENGTH.size)
    if head is None:
        return None
    body = _exactly(channel, LENGTH.unpack(head)[0])
    return None if body is None else decode(body)


def receive_bounded(channel: socket.socket) -> bytearray | None:
    """The body of the next message of a blocking channel; None once the other side is gone.

    Raises ValueError for one longer than `LONGEST_ANSWER`, before it is read.
    """
    head = _exactly(channel, LENGTH.size)
    if head is None:
        return None
    size = LENGTH.unpack(head)[0]
    if size > LONGEST_ANSWER:
        raise ValueError(f"a message of {size} bytes; at most {LONGEST_ANSWER} are read")
    return _exactly(channel, size)


def _exactly(channel: socket.socket, size: int) -> bytearray | None:
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(min(size - len(data), 2**20))
        if not piece:
            return None
        data += piece
    return data


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no plain data (numbers, text, lists and dicts are)")
