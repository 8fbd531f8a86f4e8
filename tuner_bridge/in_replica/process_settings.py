"""Settings that a script's top level makes in its process, and not in names: replicas do not run those lines.

Told are settings that change what an objective computes or prints: torch's default type and precision, the levels of
loggers, the limit of recursion. Others, such as functions of libraries that a script has replaced, stay in the script.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping
from typing import Any

_RECURSION = 1000
"""Python's own limit."""


def settings_of_process() -> dict[str, Any]:
    """Return the process's settings as JSON, without those that Python and torch have by themselves."""
    settings_found: dict[str, Any] = {}
    if sys.getrecursionlimit() != _RECURSION:
        settings_found["recursion"] = sys.getrecursionlimit()
    if "torch" in sys.modules and (settings := _torchs(sys.modules["torch"])):
        settings_found["torch"] = settings
    if logs := _loggings():
        settings_found["logging"] = logs
    if "multiprocessing.context" in sys.modules:
        import multiprocessing

        if method := multiprocessing.get_start_method(allow_none=True):
            settings_found["processes"] = method
    return settings_found


def set_process(settings: Mapping[str, Any]) -> None:
    """Apply the settings in a replica, before it loads its code."""
    if "recursion" in settings:
        sys.setrecursionlimit(settings["recursion"])
    if "logging" in settings:
        _set_logging(settings["logging"])
    if "processes" in settings:
        import multiprocessing

        multiprocessing.set_start_method(settings["processes"], force=True)
    if "torch" in settings:
        _set_torch(settings["torch"])


def _torchs(torch: Any) -> dict[str, Any]:
    processes = sys.modules.get("torch.multiprocessing")
    sharing = "file_descriptor" if processes is None else processes.get_sharing_strategy()
    present_and_own = {
        "dtype": (str(torch.get_default_dtype()).removeprefix("torch."), "float32"),
        "matmul": (torch.get_float32_matmul_precision(), "highest"),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), False),
        "deterministic_warns": (torch.is_deterministic_algorithms_warn_only_enabled(), False),
        "cudnn_benchmark": (torch.backends.cudnn.benchmark, False),
        "cudnn_deterministic": (torch.backends.cudnn.deterministic, False),
        "sharing": (sharing, "file_descriptor"),
    }
    return {name: present for name, (present, own) in present_and_own.items() if present != own}


def _set_torch(settings: Mapping[str, Any]) -> None:
    # The driver has it, so the code uses it.
    torch = importlib.import_module("torch")
    if "dtype" in settings:
        torch.set_default_dtype(getattr(torch, settings["dtype"]))
    if "matmul" in settings:
        torch.set_float32_matmul_precision(settings["matmul"])
    if settings.get("deterministic"):
        torch.use_deterministic_algorithms(True, warn_only=settings.get("deterministic_warns", False))
    if "cudnn_benchmark" in settings:
        torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    if "cudnn_deterministic" in settings:
        torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    if "sharing" in settings:
        torch.multiprocessing.set_sharing_strategy(settings["sharing"])


def _loggings() -> dict[str, Any]:
    """Levels that were set, and the format of the root's lines where they go to the terminal."""
    root = logging.getLogger()
    levels = {
        name: logger.level
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET
    }
    loggings: dict[str, Any] = {"levels": levels} if levels else {}
    if root.level != logging.WARNING:
        loggings["root"] = root.level
    for handler in root.handlers:
        if type(handler) is logging.StreamHandler:
            formatter = handler.formatter or logging.Formatter(logging.BASIC_FORMAT)
            loggings["format"] = [formatter._fmt, formatter.datefmt]
            break
    return loggings


def _set_logging(settings: Mapping[str, Any]) -> None:
    if "format" in settings:
        line, date = settings["format"]
        style: Any = "%" if line is None or "%(" in line else "{" if "{" in line else "$"
        logging.basicConfig(format=line, datefmt=date, style=style)
    if "root" in settings:
        logging.getLogger().setLevel(settings["root"])
    for name, level in settings.get("levels", {}).items():
        logging.getLogger(name).setLevel(level)
