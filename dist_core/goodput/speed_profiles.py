"""Speeds of emulated devices: step times by number of replicas and batch size, published or one's own.

The published ones are this project's throughput model, fitted to the step times that the artifact of Pollux (OSDI'21,
section 5.3) gives for nodes with four T4 GPUs; they meet those times to 4 to 7% in the median. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dist_core.goodput.throughput import ThroughputParams

PUBLISHED: Mapping[str, ThroughputParams] = {
    "resnet18-cifar10": ThroughputParams(0.01667, 0.0007107, 0.1226, 0.002653, 0.03116, 0.004529, 2.198),
    "resnet50-imagenet": ThroughputParams(0.06298, 0.004513, 0.3101, 0.006421, 0.07822, 0.01146, 2.83),
    "bert-squad": ThroughputParams(0.1701, 0.05878, 1.363, 0.0116, 0.2706, 0.04256, 2.022),
    "deepspeech2-arctic": ThroughputParams(0.3057, 0.02395, 0.5001, 0.01001, 0.09423, 0.01596, 1.437),
    "yolov3-voc": ThroughputParams(0.1842, 0.02561, 0.7508, 0.01099, 0.116, 0.03713, 1.12),
    "neumf-movielens": ThroughputParams(0.006922, 6.716e-07, 0.01453, 0.0005127, 0.00305, 0.001138, 1.0),
}


@dataclass(frozen=True, slots=True)
class SpeedProfile:
    name: str
    params: ThroughputParams

    def to_text(self) -> str:
        """Return the profile as text for an environment variable; ``from_text`` reads it."""
        return json.dumps({"name": self.name, **asdict(self.params)})

    @classmethod
    def from_text(cls, text: str) -> SpeedProfile:
        document = json.loads(text)
        return cls(document["name"], _params(document, "the profile"))


def speed_profile(text: str) -> SpeedProfile:
    """Return a published profile by name or one in a JSON file, at another speed where the text ends in ``@FACTOR``.

    Raises ValueError with what there is to choose from, or what is wrong in the file.
    """
    name, at, factor = text.rpartition("@") if "@" in text else (text, "", "1")
    try:
        times = float(factor)
        if not 0.0 < times < 1e6:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text!r} ends in @{factor}; the speed factor must be a number above 0 and below 1e6, such as @10"
        ) from None
    params = PUBLISHED.get(name)
    if params is None:
        path = Path(name)
        if path.suffix != ".json":
            raise ValueError(
                f"{name!r} is not a speed profile; choose one of {', '.join(PUBLISHED)}, or name a JSON file with "
                f"{', '.join(field.name for field in fields(ThroughputParams))}"
            )
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"the speed profile {name} cannot be read: {error}") from error
        params = _params(document, name)
        name = path.stem
    return SpeedProfile(name + at + (factor if at else ""), params.slower(1.0 / times))


def _params(document: Any, where: str) -> ThroughputParams:
    names = [field.name for field in fields(ThroughputParams)]
    missing = [name for name in names if not isinstance(document, dict) or name not in document]
    if missing:
        raise ValueError(f"{where} has no {missing[0]!r}; it needs {', '.join(names)}, in seconds (gamma without unit)")
    try:
        return ThroughputParams(*(float(document[name]) for name in names))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
