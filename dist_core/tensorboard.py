"""Scalars for TensorBoard, under a prefix: any object with ``add_scalar`` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def write_scalars(writer: Any, global_step: int, tag_prefix: str, values: Mapping[str, float]) -> None:
    """Write each value under ``tag_prefix``, which ends with a slash or gets one."""
    prefix = tag_prefix if not tag_prefix or tag_prefix.endswith("/") else f"{tag_prefix}/"
    for name, value in values.items():
        writer.add_scalar(f"{prefix}{name}", value, global_step)
