"""Generated parts of the manifests: a trial's fields in the chart, and its defaults for `kubectl apply -k`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import helm_python as helm
import yaml

from trials.fields import schema
from trials.kubernetes.names import Document
from trials.kubernetes.resources.documents import SPEC_KEYS
from trials.spec import TrialSpec

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "elastune"
TARGET = ROOT / "deploy" / "kustomize"
TRIALS = CHART / "files" / "trials.yaml"
NAMESPACE = "elastune"
BEGIN, END = "# Written by scripts/render_manifests.py from trials/spec.py.", "# Of clusters alone."


def rendered(values: Mapping[str, Any] = MappingProxyType({}), namespace: str = NAMESPACE) -> dict[str, str]:
    """File name to content. What only Helm itself can run, its hooks, is left out."""
    chart = helm.Chart.load(CHART)
    documents = []
    for text in chart.render(dict(values), name="elastune", namespace=namespace).values():
        documents += [each for each in yaml.safe_load_all(text) if isinstance(each, dict) and "kind" in each]
    definitions = [each for each in documents if each["kind"] == "CustomResourceDefinition"]
    others = [each for each in documents if each not in definitions and not _is_hook(each)]
    for each in documents:
        labels = each["metadata"].get("labels") or {}
        labels.pop("helm.sh/chart", None)
        if "app.kubernetes.io/managed-by" in labels:
            labels["app.kubernetes.io/managed-by"] = "kustomize"
    home: Document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    kustomization: Document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": ["namespace.yaml", "definitions.yaml", "scheduler.yaml"],
    }
    return {
        "kustomization.yaml": _text([kustomization]),
        "namespace.yaml": _text([home]),
        "definitions.yaml": _text(sorted(definitions, key=_key)),
        "scheduler.yaml": _text(sorted(others, key=_key)),
    }


def _is_hook(document: Document) -> bool:
    metadata = document["metadata"]
    assert isinstance(metadata, dict)
    return "helm.sh/hook" in (metadata.get("annotations") or {})


def _key(document: Document) -> tuple[str, str]:
    return str(document["kind"]), str(document["metadata"]["name"])


def _text(documents: list[Document]) -> str:
    written = yaml.safe_dump_all(documents, sort_keys=True, width=120)
    return f"# Written by scripts/render_manifests.py from the chart's defaults.\n{written}"


def with_the_fields_of_a_trial(definition: str) -> str:
    """The chart's definition of trials, with the properties that ``TrialSpec`` describes."""
    before, _, rest = definition.partition(BEGIN)
    _, _, behind = rest.partition(END)
    indent = " " * (len(before) - len(before.rstrip(" ")))
    lines = [
        f"{SPEC_KEYS[name]}: {yaml.safe_dump(each, default_flow_style=True, sort_keys=False, width=10**6).strip()}"
        for name, each in schema(TrialSpec).items()
    ]
    return before + BEGIN + "".join(f"\n{indent}{line}" for line in lines) + f"\n{indent}" + END + behind


def main() -> int:
    TRIALS.write_text(with_the_fields_of_a_trial(TRIALS.read_text()))
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
