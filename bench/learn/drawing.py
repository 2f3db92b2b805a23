"""Draws the figures of the page: a kernel's way of work in two states, with the bytes that the emulator counted."""

from __future__ import annotations

from collections.abc import Mapping

from rooflab.bench.base.plain import JsonObject


def figures(data: Mapping[str, JsonObject]) -> dict[str, object]:
    """Returns the figures by name."""
    return {}
