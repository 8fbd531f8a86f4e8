"""Scripts for NNI experiments, and what its trials are asked for."""

from __future__ import annotations

import json
from typing import Any

REPORTS = """
import os, time
import nni
x = nni.get_next_parameter()["x"]
print("gets", x, "as trial", nni.get_sequence_id(), flush=True)
for step in range(6):
    time.sleep(float(os.environ.get("STEP_SECONDS", "0.05")))
    nni.report_intermediate_result(x + step)
nni.report_final_result(x + 10)
"""


def x_of(trial: dict[str, Any]) -> float:
    return float(json.loads(trial["hyperParameters"][0])["parameters"]["x"])
