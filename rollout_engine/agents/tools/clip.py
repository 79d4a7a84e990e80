"""Cuts the output of a tool to what the agent may see: its head and its tail."""

from __future__ import annotations


def clip(output: bytes, max_bytes: int) -> str:
    """The output as text. Above `max_bytes` of UTF-8 half of them are its head and half its tail.

    A line between them says how much is missing; it comes on top. Bytes that are no UTF-8 become U+FFFD.
    """
    left_out = 0
    if len(output) > 2 * max_bytes:  # decoding makes nothing shorter: what is kept below lies within
        left_out = len(output) - 2 * max_bytes
        output = output[:max_bytes] + output[-max_bytes:]
    text = output.decode("utf-8", "replace")
    whole = text.encode()
    if not left_out and len(whole) <= max_bytes:
        return text
    keep = max_bytes // 2
    # A character that the cut goes through is dropped, not replaced.
    head = whole[: max_bytes - keep].decode("utf-8", "ignore")
    tail = whole[len(whole) - keep :].decode("utf-8", "ignore")
    left_out += len(whole) - len(head.encode()) - len(tail.encode())
    return f"{head}\n[... {left_out:,} bytes left out ...]\n{tail}"
