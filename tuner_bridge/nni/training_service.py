"""Configuration of an experiment's training service: ``trainingService: {platform: tuner_bridge, ...}``.

NNI finds this by the name of the registered package, which has to be the platform's name. It checks types with
typeguard, which does not understand postponed annotations.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Union

from nni.experiment.config.training_service import TrainingServiceConfig

from trials.errors import InvalidStudyTerms, InvalidTrialSpec
from trials.spec import check_replica_bounds, sizes_from
from trials.terms import StudyTerms
from tuner_bridge.driving.template import sizes_within
from tuner_bridge.errors import BridgeError, InvalidSweep
from tuner_bridge.trackers import trackers_named

PLATFORM = "tuner_bridge"


@dataclass(init=False)
class ElastuneConfig(TrainingServiceConfig):  # type: ignore[misc]  # NNI has no types
    """The ``trainingService`` section of an experiment's configuration.

    ``slots`` and what is said of each, and ``warm_start``, are for a scheduler of the experiment's own.

    ``scheduler_url`` names one that is shared; without it, ELASTUNE_URL does.
    """

    platform: str = PLATFORM
    reuse_mode: bool = True
    """Makes NNI look for a registered service; nothing is reused."""
    min_replicas: int = 1
    max_replicas: Optional[int] = None
    """Default: all slots."""
    slots_per_replica: Union[int, List[int]] = 1
    """Slots of a replica, for models larger than a slot, with a process on each; several numbers to choose from."""
    slots: Optional[int] = None
    slots_per_gpu: Optional[int] = None
    gpus_per_slot: Optional[int] = None
    """GPUs of a slot, for trial code that spreads a model over several."""
    memory_per_slot: Optional[Union[float, int]] = None
    """GiB."""
    scheduler_url: Optional[str] = None
    weight: Optional[Union[float, int]] = None
    priority: Optional[int] = None
    quota: Optional[int] = None
    goal: Optional[str] = None
    yields_to: Optional[List[str]] = None
    warm_start: bool = True
    """Start replicas from a process that has torch in memory."""
    trackers: Optional[List[Dict[str, Any]]] = None
    """Such as ``{name: MLflow, classArgs: {experiment: digits}}``, of ``tuner_bridge.trackers``."""
    python: str = sys.executable
    """The interpreter of the driver and of replicas."""

    def _canonicalize(self, parents: List[Any]) -> None:
        super()._canonicalize(parents)
        own: Any = self  # NNI has no types
        if isinstance(parents[0].training_service, list):
            raise ValueError(
                "trainingService is a list; tuner_bridge cannot be combined with other services, so give it without "
                "the list"
            )
        if own.trial_gpu_number is not None and own.trial_gpu_number > 1:
            raise ValueError(
                f"trialGpuNumber is {own.trial_gpu_number}; a slot is one GPU where there are any. Leave it out, and "
                "set the number of replicas of a trial with minReplicas and maxReplicas, and the slots of each with "
                "slotsPerReplica"
            )
        for tracker in own.trackers or ():
            given = tracker.get("classArgs") or {}
            if "folder" in given:
                given["folder"] = str(Path(own._base_path or ".", given["folder"]).absolute())
        # NNI would look for GPUs on machines of its own.
        own.trial_gpu_number = parents[0].trial_gpu_number = None
        if own.nni_manager_ip is None:
            own.nni_manager_ip = "127.0.0.1"

    def _validate_canonical(self) -> None:
        super()._validate_canonical()
        if not self.reuse_mode:
            raise ValueError(
                "reuseMode is false; leave it out: NNI finds registered training services only in reuse mode"
            )
        most = self.min_replicas if self.max_replicas is None else self.max_replicas
        try:
            check_replica_bounds(self.min_replicas, most)
            sizes = sizes_from(self.slots_per_replica)
            terms = ("weight", "priority", "quota", "goal", "yields_to")
            asked = {name: getattr(self, name) for name in terms}
            StudyTerms.from_json({name: value for name, value in asked.items() if value is not None})
            trackers_named(self.trackers or ())
        except (InvalidTrialSpec, InvalidStudyTerms, InvalidSweep) as error:
            raise ValueError(f"trainingService: {error}") from error
        own_slots: dict[str, float | None] = {
            "slots": self.slots,
            "slotsPerGpu": self.slots_per_gpu,
            "gpusPerSlot": self.gpus_per_slot,
            "memoryPerSlot": self.memory_per_slot,
        }
        for name, value in own_slots.items():
            if value is None:
                continue
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"trainingService: {name} is {value}; it must be above 0")
            if self.scheduler_url is not None:
                raise ValueError(
                    f"trainingService: {name} is {value}, but schedulerUrl names a scheduler that has slots of its "
                    "own; leave one of them out"
                )
        if (self.slots_per_gpu or 1) > 1 and (self.gpus_per_slot or 1) > 1:
            raise ValueError(
                "trainingService: a slot is either a part of a GPU or several GPUs; leave out slotsPerGpu or "
                "gpusPerSlot"
            )
        if self.slots is not None:
            try:
                sizes_within(sizes, self.min_replicas, self.slots, "minReplicas")
            except BridgeError as error:
                raise ValueError(f"trainingService: {error}") from error
        if self.scheduler_url is not None and not self.scheduler_url.startswith(("http://", "https://")):
            raise ValueError(
                f"trainingService: schedulerUrl is {self.scheduler_url!r}; it must start with http:// or https://, "
                "such as http://127.0.0.1:7300"
            )


nni_training_service_info = SimpleNamespace(
    config_class=ElastuneConfig,
    node_module_path=Path(__file__).parent / "elastune_training_service.js",
    node_class_name="ElastuneEnvironmentService",
)
