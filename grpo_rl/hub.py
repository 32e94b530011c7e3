"""A check whether the Hugging Face hub can be reached; its own client tries for half a minute."""

from __future__ import annotations

import os
import queue
import socket
import threading
from urllib.parse import urlsplit

TIMEOUT_S = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def why_unreachable() -> str | None:
    """Return why the hub cannot be reached, within `TIMEOUT_S`; None if it can, or it is unclear."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or any(os.environ.get(name) for name in PROXIES):
        return None
    hub = urlsplit(constants.ENDPOINT)
    host, port = str(hub.hostname), hub.port or (80 if hub.scheme == "http" else 443)
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=TIMEOUT_S).close()
            answers.put(None)
        except OSError as error:
            answers.put(error.strerror or str(error))

    # In a thread, as a name server that does not answer holds up the look-up for longer than any timeout of a socket.
    threading.Thread(target=connect, daemon=True).start()
    try:
        why = answers.get(timeout=TIMEOUT_S)
    except queue.Empty:
        why = f"no answer within {TIMEOUT_S:g} s"
    return None if why is None else f"{host} cannot be reached ({why})"
