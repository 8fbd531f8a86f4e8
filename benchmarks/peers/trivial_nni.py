"""40 trivial trials under NNI's local training service, two at a time: `python trivial_nni.py FOLDER N PORT`."""

import sys
from pathlib import Path

from nni.experiment import Experiment

TRIAL = """
import sys, time
import nni, torch
nni.get_next_parameter()
nni.report_final_result(1.0)
with open(sys.argv[1], "a") as file:
    file.write(f"{time.time()}\\n")
"""

if __name__ == "__main__":
    folder, trials, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    (folder / "code").mkdir()
    (folder / "code" / "trial.py").write_text(TRIAL)
    experiment = Experiment("local")
    experiment.config.experiment_working_directory = folder / "nni"
    experiment.config.trial_command = f"{sys.executable} trial.py {folder}/ends"
    experiment.config.trial_code_directory = folder / "code"
    experiment.config.search_space = {"x": {"_type": "uniform", "_value": [0, 1]}}
    experiment.config.tuner.name = "Random"
    experiment.config.max_trial_number = trials
    experiment.config.trial_concurrency = 2
    experiment.run(port, wait_completion=True)
    experiment.stop()
