"""Place of a sweep's code for replicas on a cluster: a packed copy of the working folder, an image, or a volume."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trials.spec import TrialSpec
from tuner_bridge.driving.packing import Package, pack
from tuner_bridge.errors import InvalidSweep


@dataclass(slots=True)
class CodeOnCluster:
    """``where``: ``pack``, ``image``, or the path at which pods have the working folder."""

    where: str
    image: str
    package: Package | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> CodeOnCluster:
        """ELASTUNE_CODE (default: pack) and ELASTUNE_IMAGE (default: the study's or the cluster's)."""
        environ = os.environ if environ is None else environ
        where = environ.get("ELASTUNE_CODE", "pack")
        if where not in ("pack", "image") and not os.path.isabs(where):
            raise InvalidSweep(
                f"ELASTUNE_CODE is {where!r}; it must be 'pack', 'image', or the absolute path of this folder in the "
                "cluster's pods"
            )
        return cls(where, environ.get("ELASTUNE_IMAGE", ""))

    def place(self, spec: TrialSpec) -> TrialSpec:
        """The trial with what its replicas need to know; packs the folder at the first call. Raises InvalidSweep."""
        spec = replace(spec, image=spec.image or self.image)
        if self.where == "image":
            return spec
        if self.where != "pack":
            return replace(spec, moved_to=self.where)
        if self.package is None:
            self.package = pack(Path(spec.working_dir))
        return replace(spec, package=self.package.digest)
