"""Template of an Optuna sweep's trials, from its objective and options."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from dist_core.state.seeds import present_seed
from trials.inside.imports import OUR_PACKAGES, lies_among_installed, package_of
from trials.spec import check_replica_bounds, sizes_from
from tuner_bridge.driving.pickling import Pickled, pickled
from tuner_bridge.driving.template import TrialTemplate, own_python_path, sizes_within
from tuner_bridge.errors import BridgeError, InvalidSweep
from tuner_bridge.in_replica.scripts import Script, installed_imports
from tuner_bridge.in_replica.shipped import has_code
from tuner_bridge.optuna.named_study import NamedStudy
from tuner_bridge.optuna.program import Program
from tuner_bridge.optuna.trainers import TrainerSearch

logger = logging.getLogger(__name__)

ENTRYPOINT = "tuner_bridge.optuna.replica:main"


def _checked(objective: Any) -> None:
    if not callable(objective):
        raise InvalidSweep(f"the objective is {objective!r}; pass a function that takes a trial and returns its value")
    if isinstance(objective, type):
        raise InvalidSweep(
            f"the objective is the class {objective.__qualname__}; pass an instance of it, or a function"
        )


def template_of(
    objective: Callable[[Any], Any] | Script | TrainerSearch,
    min_replicas: int,
    max_replicas: int | None,
    promise_metric: tuple[str, str] | None = None,
    fresh_processes: bool = False,
    *,
    slots_per_replica: int | Sequence[int] = 1,
    study: Any = None,
) -> TrialTemplate:
    """Return the template of a sweep's trials; raises InvalidSweep and InvalidTrialSpec for what they cannot run.

    ``study``: the sweep's; an objective that reads it has its trial's in replicas.
    """
    if "ELASTUNE_API" in os.environ:
        if has_code():
            raise InvalidSweep(
                "optimize() was called by an objective, within a trial of another sweep. Run the study within the "
                "trial by study.optimize(), or plan one sweep after the other"
            )
        raise InvalidSweep(
            "optimize() was called inside a replica, because a module of the script calls it when imported. Put the "
            'call under if __name__ == "__main__": in the script'
        )
    payload: dict[str, Any] = {}
    preload: tuple[str, ...] = ()
    code: Pickled | None = None
    if isinstance(objective, Program):
        if min_replicas > 1 or (max_replicas or 1) > 1:
            raise InvalidSweep(
                f"min_replicas is {min_replicas} and max_replicas {max_replicas}; a program runs on one replica"
            )
        max_replicas = 1
        payload["program"] = objective.to_json()
    elif isinstance(objective, TrainerSearch):
        code = pickled(objective, "the search")
        payload["trainer"] = code.shipped.to_json()
        # Of its library, which loads piece by piece, that one has the most behind it.
        preload = ("torch", "dist_core.huggingface.trainer", "transformers.trainer")
    elif isinstance(objective, Script):
        payload["script"] = objective.to_json()
        # What it imports from other files of its author is not known here.
        imported = (name for name in objective.imports() if name.partition(".")[0] != "tuner_bridge")
        preload = (*imported, "torch")
    else:
        _checked(objective)
        code = pickled(objective, "the objective", None if study is None else (study, NamedStudy))
        payload["objective"] = code.shipped.to_json()
        preload = (*_installed(code.modules), *_imported_first(objective))
        if "torch" in sys.modules:
            # The script, or what that imports, is what has brought it into this process.
            preload = (*preload, "torch")
        payload["keeps_process"] = not fresh_processes
    if promise_metric is not None:
        check_promise_metric(promise_metric)
        payload["promise_metric"] = promise_metric[0]
    sizes = sizes_from(slots_per_replica)
    check_replica_bounds(min_replicas, min_replicas if max_replicas is None else max_replicas)
    return TrialTemplate(
        entrypoint=ENTRYPOINT,
        payload=payload,
        min_replicas=min_replicas,
        max_replicas=min_replicas if max_replicas is None else max_replicas,
        replica_sizes=sizes,
        working_dir=os.getcwd(),
        python_path=own_python_path(),
        preload=(*preload, ENTRYPOINT.partition(":")[0]),
        code=() if code is None else code.shipped.digests,
        contents={} if code is None else code.contents,
        seed=present_seed(),
    )


def _installed(names: Iterable[str]) -> tuple[str, ...]:
    """Installed packages among these modules, and among what the user's own ones use: worth importing beforehand."""
    installed: dict[str, None] = {}
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if name in seen or not isinstance(file, str):
            continue
        seen.add(name)
        if lies_among_installed(file):
            installed[name] = None
        elif package_of(name) not in OUR_PACKAGES:
            uses = [value for key, value in vars(module).items() if not key.startswith("__")]
            waiting += [each for each in map(_home_of, uses) if each is not None]
    return tuple(sorted(name for name in installed if not name.startswith("_")))


def _imported_first(objective: Callable[[Any], Any]) -> tuple[str, ...]:
    """Return the modules of installed packages with whose imports the objective's body begins.

    Later ones are left to its replicas: what comes before them may decide what they find.
    """
    function: Any = objective
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function):
        function = type(function).__call__
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return ()
    first = itertools.takewhile(_imports_or_describes, getattr(found, "body", ()))
    return tuple(name for name in installed_imports(first) if package_of(name) not in OUR_PACKAGES)


def _imports_or_describes(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Import | ast.ImportFrom)


def _home_of(value: Any) -> str | None:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else None


def check_promise_metric(metric: Any) -> None:
    if not (
        isinstance(metric, tuple)
        and len(metric) == 2
        and isinstance(metric[0], str)
        and metric[1] in ("minimize", "maximize")
    ):
        raise InvalidSweep(
            f"promise_metric is {metric!r}; it must be a name and a direction, such as ('accuracy', 'maximize')"
        )


def bounded(template: TrialTemplate, slots: int, max_replicas: int | None) -> TrialTemplate:
    """Fill in and check the bounds against the slots there are."""
    try:
        sizes = sizes_within(template.replica_sizes, template.min_replicas, slots)
    except BridgeError as error:
        raise InvalidSweep(f"{error} (slots=, `elastune up --slots`)") from None
    room = slots // sizes[0]
    if max_replicas is not None and max_replicas > room:
        logger.warning(
            "max_replicas is %d but there are %d slots; trials get at most %d replicas", max_replicas, slots, room
        )
    most = room if max_replicas is None else min(max_replicas, room)
    return replace(template, max_replicas=most, replica_sizes=sizes)
