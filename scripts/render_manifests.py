"""The plain manifests for `kubectl apply -k`, from the chart with the real Helm engine; written for its defaults."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import helm_python as helm
import yaml

from trials.kubernetes.names import Document

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "elastune"
TARGET = ROOT / "deploy" / "kustomize"
NAMESPACE = "elastune"


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


def main() -> int:
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
