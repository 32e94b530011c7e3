"""A check whether the Hugging Face hub can be reached; its own client tries for half a minute."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from grpo_rl.background import has_ended, in_background

TIMEOUT_S = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def why_unreachable() -> str | None:
    """Return why the hub cannot be reached, within `TIMEOUT_S`; None if it can, or it is unclear."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or any(os.environ.get(name) for name in PROXIES):
        return None
    hub = urlsplit(constants.ENDPOINT)
    host, port = str(hub.hostname), hub.port or (80 if hub.scheme == "http" else 443)
    # In a thread, as a name server that does not answer holds up the look-up for longer than any timeout of a socket.
    connecting = in_background("hub", lambda: socket.create_connection((host, port), timeout=TIMEOUT_S).close())
    if not has_ended(connecting, TIMEOUT_S):
        return f"{host} cannot be reached (no answer within {TIMEOUT_S:g} s)"
    error = connecting.exception()
    return None if error is None else f"{host} cannot be reached ({getattr(error, 'strerror', None) or error})"
