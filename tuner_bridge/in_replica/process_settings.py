"""Settings that a script's top level makes in its process, and not in names: replicas do not run those lines.

Told are settings that change what an objective computes or prints: torch's default type and precision, how NumPy,
scikit-learn, pandas, decimal and matplotlib were set, the levels of loggers, the limit of recursion. Others, such as
functions of libraries that a script has replaced, stay in the script.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dist_core.hooks import when_imported

logger = logging.getLogger(__name__)

_RECURSION = 1000
"""Python's own limit."""


def settings_of_process() -> dict[str, Any]:
    """Return the process's settings as JSON, without those that Python and torch have by themselves."""
    settings_found: dict[str, Any] = {}
    if sys.getrecursionlimit() != _RECURSION:
        settings_found["recursion"] = sys.getrecursionlimit()
    if "torch" in sys.modules and (settings := _torchs(sys.modules["torch"])):
        settings_found["torch"] = settings
    libraries = {name: _read_library(name) for name in _LIBRARIES}
    if libraries := {name: found for name, found in libraries.items() if found}:
        settings_found["libraries"] = libraries
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
    for name, of_library in settings.get("libraries", {}).items():
        if name in sys.modules:
            _set_library(name, of_library)
        else:
            # The code may have no use for it.
            when_imported(name, functools.partial(_set_library, name, of_library))


def _read_library(name: str) -> dict[str, Any]:
    if sys.modules.get(name) is None:
        return {}
    try:
        return _LIBRARIES[name][0](sys.modules[name])
    except Exception as error:
        # One that is half imported, or something else by that name.
        logger.info("the settings of %s were not read: %s: %s", name, type(error).__name__, error)
        return {}


def _set_library(name: str, settings: Mapping[str, Any]) -> None:
    try:
        _LIBRARIES[name][1](sys.modules[name], settings)
    except Exception as error:
        # Another version of it, on another machine.
        logger.warning("the script's settings of %s were not made here: %s: %s", name, type(error).__name__, error)


def _differing(present: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a script has made, as far as they are plain values."""
    return {name: value for name, value in present.items() if _is_plain(value) and value != own.get(name)}


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float, str, type(None)) or (type(value) is list and all(map(_is_plain, value)))


def _numpys(numpy: Any) -> dict[str, Any]:
    errors = dict.fromkeys(("over", "divide", "invalid"), "warn") | {"under": "ignore"}
    options = {name: each for name, each in numpy.get_printoptions().items() if name in _PRINTED_BY_NUMPY}
    found = {"errors": _differing(numpy.geterr(), errors), "printed": _differing(options, _PRINTED_BY_NUMPY)}
    return {name: each for name, each in found.items() if each}


_PRINTED_BY_NUMPY = {
    "edgeitems": 3, "threshold": 1000, "floatmode": "maxprec", "precision": 8, "suppress": False, "linewidth": 75,
    "nanstr": "nan", "infstr": "inf", "sign": "-", "legacy": False,
}  # fmt: skip


def _set_numpy(numpy: Any, settings: Mapping[str, Any]) -> None:
    numpy.seterr(**settings.get("errors", {}))
    numpy.set_printoptions(**settings.get("printed", {}))


def _decimals(decimal: Any) -> dict[str, Any]:
    context, own = decimal.getcontext(), decimal.DefaultContext
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    return _differing({each: getattr(context, each) for each in names}, {each: getattr(own, each) for each in names})


def _set_decimal(decimal: Any, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        # Of the context of all threads, and of this one.
        setattr(decimal.DefaultContext, name, value)
        setattr(decimal.getcontext(), name, value)


def _sklearns(sklearn: Any) -> dict[str, Any]:
    own = getattr(sys.modules.get("sklearn._config"), "_global_config", None)
    return {} if own is None else _differing(sklearn.get_config(), own)


def _pandas_options(pandas: Any) -> dict[str, Any]:
    registered = getattr(sys.modules.get("pandas._config.config"), "_registered_options", {})
    own = {name: option.defval for name, option in registered.items()}
    deprecated = getattr(sys.modules.get("pandas._config.config"), "_deprecated_options", {})
    return _differing({name: pandas.get_option(name) for name in own if name not in deprecated}, own)


def _set_pandas(pandas: Any, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        pandas.set_option(name, value)


def _matplotlibs(matplotlib: Any) -> dict[str, Any]:
    # Asked for its backend by name it would start one. A notebook's is none of a replica's.
    present = {name: value for name, value in dict.items(matplotlib.rcParams) if name not in ("backend", "interactive")}
    return _differing(present, matplotlib.rcParamsOrig)


_LIBRARIES: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[[Any, Mapping[str, Any]], None]]] = {
    "numpy": (_numpys, _set_numpy),
    "decimal": (_decimals, _set_decimal),
    "sklearn": (_sklearns, lambda sklearn, settings: sklearn.set_config(**settings)),
    "pandas": (_pandas_options, _set_pandas),
    "matplotlib": (_matplotlibs, lambda matplotlib, settings: matplotlib.rcParams.update(settings)),
}
"""Functions that read the settings which a library was given, and that make them."""


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
