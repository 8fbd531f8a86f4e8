"""An objective by value: what a script's process has when the sweep begins is what a replica's process finds."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nine_shapes import EXPECTED, found_in_replicas
from tests.support.project import ROOT
from tests.support.scripts import run_python
from tuner_bridge.driving.pickling import pickled
from tuner_bridge.errors import InvalidSweep
from tuner_bridge.optuna.objective_template import template_of

SENDS = """
import json, pathlib, sys
from tuner_bridge.driving.pickling import pickled

def send(value, folder="sent"):
    found = pickled(value, "the objective")
    pathlib.Path(folder).mkdir(exist_ok=True)
    for digest, content in found.contents.items():
        (pathlib.Path(folder) / digest).write_bytes(content if isinstance(content, bytes) else b"".join(content))
    (pathlib.Path(folder) / "shipped.json").write_text(json.dumps(found.shipped.to_json()))
"""
RECEIVES = """
import json, pathlib
from tuner_bridge.in_replica.shipped import ShippedCode, receive_from
sent = pathlib.Path("sent")
objective = receive_from(ShippedCode.from_json(json.loads((sent / "shipped.json").read_text())), sent.joinpath)
"""


def run(folder: Path, *command: str) -> str:
    return run_python(folder, *command, clean=True, environ={"PYTHONPATH": f"{ROOT}:{folder}"}).stdout


def there_and_back(folder: Path, script: str, in_replica: str, *command: str) -> str:
    """Return the output of a replica that got the objective of a script named ``tune.py``."""
    (folder / "tune.py").write_text(SENDS + script)
    run(folder, *(command or ("tune.py",)))
    (folder / "replica.py").write_text(RECEIVES + in_replica)
    return run(folder, "replica.py").strip()


SHAPES = {
    "a function": "K = 4\ndef objective(trial):\n    return trial + K\nsend(objective)",
    "a lambda": "K = 4\nsend(lambda trial: trial + K)",
    "a closure": "def make(k):\n    def objective(trial):\n        return trial + k\n    return objective\n"
    "send(make(4))",
    "a method": "class A:\n    k = 4\n    def of(self, trial):\n        return trial + self.k\nsend(A().of)",
    "a partial": "import functools\ndef f(k, trial):\n    return trial + k\nsend(functools.partial(f, 4))",
    "an object": "class A:\n    def __init__(self):\n        self.k = 4\n"
    "    def __call__(self, trial):\n        return trial + self.k\nsend(A())",
    "a cached helper": "import functools\n@functools.lru_cache(maxsize=3)\ndef k():\n    return 4\n"
    "send(lambda trial: trial + k())",
    "one with a lock": "import threading\nLOCK = threading.Lock()\nINNER = threading.RLock()\ndef objective(trial):\n"
    "    with LOCK, INNER:\n        return trial + 4\nsend(objective)",
    "one of main()": "def objective(trial):\n    return trial + CONFIG['k']\nCONFIG = {'k': 1}\ndef main():\n"
    "    CONFIG['k'] = 4\n    send(objective)\nif __name__ == '__main__':\n    main()",
    "a decorated one": "import functools\ndef twice(f):\n    @functools.wraps(f)\n    def g(trial):\n"
    "        return f(trial) + 2\n    return g\n@twice\ndef objective(trial):\n    return trial + 2\nsend(objective)",
    "one that ends with its script": "def objective(trial):\n    global COUNT\n    COUNT = 4\n"
    "    return trial + COUNT\nsend(objective)\nraise SystemExit(0)",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_objectives_of_every_shape_arrive(tmp_path: Path, shape: str) -> None:
    assert there_and_back(tmp_path, SHAPES[shape], "print(objective(38))") == "42"


@pytest.mark.slow
@pytest.mark.usefixtures("scheduler")
def test_nine_shapes_in_sweeps_of_this_machine(tmp_path: Path) -> None:
    assert found_in_replicas(tmp_path, {"PYTHONPATH": str(ROOT)}) == EXPECTED


def test_a_module_that_python_starts_by_name_is_the_main_one_with_its_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("VALUE = 3")
    script = "EPOCHS = 1\ndef objective(trial):\n    from .other import VALUE\n    return EPOCHS + VALUE\n"
    script += "if __name__ == '__main__':\n    EPOCHS = 50\n    send(objective)\n"
    (package / "tune.py").write_text(SENDS + script)
    run(tmp_path, "-m", "package.tune")
    (tmp_path / "replica.py").write_text(
        RECEIVES + "import __main__\nprint(objective(1), __main__.__spec__.name, __main__.__package__)"
    )
    assert run(tmp_path, "replica.py").split() == ["53", "package.tune", "package"]


def test_a_module_that_cannot_be_imported_by_its_name_goes_by_value(tmp_path: Path) -> None:
    """As pytest has them with ``--import-mode=importlib``."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sweep.py").write_text(
        "K = 4\nclass Net:\n    k = K\ndef helper():\n    return Net.k\n"
        "def objective(trial):\n    return trial + helper()\n"
    )
    script = """
import importlib.util
spec = importlib.util.spec_from_file_location("odd.sweep", "hidden/sweep.py")
module = importlib.util.module_from_spec(spec)
sys.modules["odd.sweep"] = module
spec.loader.exec_module(module)
send(module.objective)
"""
    assert there_and_back(tmp_path, script, "print(objective(38), objective.__module__)") == "42 odd.sweep"


def test_what_the_script_has_changed_in_other_modules_is_changed_in_replicas(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text(
        "import argparse, dataclasses, os\nEPOCHS = 1\nCONFIG = {'epochs': 1}\nNAMES = ['a']\nLOADED = None\nSAME = 3\n"
        "class Options:\n    epochs = 1\n    class Inner:\n        depth = 1\n"
        "@dataclasses.dataclass\nclass Model:\n    width: int = 1\n"
        "MODEL = Model()\nARGUMENTS = argparse.Namespace(lr=float(os.environ.get('NONE', 1)))\nWHERE = os.getpid()\n"
        "def load():\n    global LOADED\n    LOADED = {'x': 1}\n"
    )
    (tmp_path / "train.py").write_text(
        "import settings\nfrom settings import CONFIG, EPOCHS, MODEL\n"
        "def objective(trial):\n    s = settings\n"
        "    return [s.EPOCHS, EPOCHS, CONFIG, s.CONFIG is CONFIG, s.NAMES, s.LOADED, s.SAME, s.Options.epochs,\n"
        "            s.Options.Inner.depth, MODEL.width, s.MODEL is MODEL, s.ARGUMENTS.lr, s.ADDED, s.WHERE]\n"
    )
    script = """
import settings, train
def main():
    settings.EPOCHS = 50
    settings.CONFIG["epochs"] = 50
    settings.NAMES.append("b")
    settings.load()
    settings.Options.epochs = settings.Options.Inner.depth = 50
    settings.MODEL.width = 50
    settings.ARGUMENTS.lr = 0.5
    settings.ADDED = "new"
    print(json.dumps(train.objective(None)))
    send(train.objective)
main()
"""
    (tmp_path / "tune.py").write_text(SENDS + script)
    plain = json.loads(run(tmp_path, "tune.py"))
    assert plain[:2] == [50, 1]
    (tmp_path / "replica.py").write_text(RECEIVES + "print(json.dumps(objective(None)))")
    assert json.loads(run(tmp_path, "replica.py")) == plain
    # On another machine what its own lines compute stays: the process there has a number of its own.
    shipped = json.loads((tmp_path / "sent" / "shipped.json").read_text())
    (tmp_path / "sent" / "shipped.json").write_text(json.dumps(shipped | {"machine": "another"}))
    (tmp_path / "replica.py").write_text(
        RECEIVES + "import os\nvalues = objective(None)\nassert values[-1] == os.getpid()\nprint(json.dumps(values))"
    )
    there = json.loads(run(tmp_path, "replica.py"))
    certain = [*range(9), 12]
    assert [there[each] for each in certain] == [plain[each] for each in certain]


def test_what_the_script_imports_for_its_effects_is_imported_in_replicas(tmp_path: Path) -> None:
    (tmp_path / "registry.py").write_text("ENTRIES = []\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for name in ("first", "second"):
        (tmp_path / "package" / f"{name}.py").write_text(f"import registry\nregistry.ENTRIES.append({name!r})\n")
    script = """
import registry
import package.first
try:
    from package import second
except ImportError:
    import nowhere
def objective(trial):
    import json.tool
    return registry.ENTRIES
if len(sys.argv) > 9:
    import antigravity
send(objective)
"""
    assert there_and_back(tmp_path, script, "print(*objective(1))") == "first second"


def test_classes_are_the_scripts_own_and_their_objects_load_there(tmp_path: Path) -> None:
    script = """
import dataclasses, enum, pickle, typing
class Net:
    class Inner:
        pass
    def __init__(self):
        self.inner = Net.Inner()
@dataclasses.dataclass
class Point:
    x: int
class Color(enum.Enum):
    RED = 1
class Pair(typing.NamedTuple):
    left: int
class OwnError(Exception):
    pass
HELD = [Net()]
def objective(trial):
    import __main__
    assert type(HELD[0]) is Net is __main__.Net
    made = [Net(), Net.Inner(), Point(3), Color.RED, Pair(4), OwnError("x")]
    pathlib.Path("made.pickle").write_bytes(pickle.dumps(made))
    return len(made)
if len(sys.argv) > 1:
    made = pickle.loads(pathlib.Path("made.pickle").read_bytes())
    assert [type(each) for each in made] == [Net, Net.Inner, Point, Color, Pair, OwnError], made
else:
    send(objective)
"""
    assert there_and_back(tmp_path, script, "print(objective(1))") == "6"
    run(tmp_path, "tune.py", "load")


@pytest.mark.slow
def test_torchs_classes_and_settings_arrive(tmp_path: Path) -> None:
    script = """
import torch
torch.set_default_dtype(torch.float64)
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x):
        return Square.apply(self.layer(x))
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, at):
        return LARGE[at, :2]
LARGE = torch.arange(200_000.0).reshape(1000, 200)
HALF = torch.ones(100_000, dtype=torch.bfloat16)
def objective(trial):
    net = Net()
    for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1):
        net(batch).sum().backward()
    LARGE[0, 0] = 7
    return net.layer.weight.grad.dtype, LARGE[-1, -1].item(), HALF.dtype, HALF.sum().item()
send(objective)
"""
    printed = there_and_back(tmp_path, script, "print(*objective(1))")
    assert printed == "torch.float64 199999.0 torch.bfloat16 99840.0"


def test_settings_of_libraries_arrive(tmp_path: Path) -> None:
    script = """
import decimal, matplotlib, numpy as np, pandas as pd, sklearn
np.seterr(over="raise")
np.set_printoptions(precision=2)
decimal.getcontext().prec = 40
sklearn.set_config(transform_output="pandas")
pd.set_option("display.max_rows", 7)
matplotlib.rcParams["figure.figsize"] = [3.0, 2.0]
def objective(trial):
    import matplotlib, pandas, sklearn
    of_numpy = np.geterr()["over"], np.geterr()["invalid"], str(np.array([0.123456]))
    size = matplotlib.rcParams["figure.figsize"]
    of_others = sklearn.get_config()["transform_output"], pandas.get_option("display.max_rows"), size
    return *of_numpy, len(str(decimal.Decimal(1) / 3)), *of_others
send(objective)
"""
    printed = there_and_back(tmp_path, script, "print(objective(1))")
    assert printed == "('raise', 'warn', '[0.12]', 42, 'pandas', 7, [3.0, 2.0])"


def test_modules_that_import_their_parts_late_arrive_by_name_and_progress_bars_at_rest(tmp_path: Path) -> None:
    script = """
import sys, types, tqdm, lazily
class Own(tqdm.tqdm):
    def __init__(self, values):
        super().__init__(values, file=open("bar.txt", "w"))
bar, around = tqdm.tqdm(total=4, file=open("bar.txt", "w")), Own([1, 2])
def objective(trial):
    bar.update(1)
    return type(lazily).__name__, lazily.part, bar.total, list(around)
send(objective)
"""
    lines = [
        "import sys, types",
        "class Late(types.ModuleType):",
        "    part = 3",
        "sys.modules[__name__] = Late('lazily')",
    ]
    (tmp_path / "lazily.py").write_text("\n".join(lines))
    assert there_and_back(tmp_path, script, "print(objective(1))") == "('Late', 3, 4, [1, 2])"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("best = 9\ndef objective(trial):\n    global best\n    best = trial\nsend(objective)", "sets the global best"),
        ("import random\nown = random.Random(0)\nsend(lambda trial: own)", "draw from too (a random.Random)"),
        ("import tqdm\nbar = tqdm.tqdm(disable=True)\nsend(lambda trial: bar)", "carries a progress bar"),
        ("send(lambda trial: [each for each in range(trial)])", ""),
    ],
)
def test_what_replicas_have_a_copy_of_is_told(tmp_path: Path, script: str, words: str) -> None:
    (tmp_path / "tune.py").write_text(SENDS + script)
    told = run_python(tmp_path, "tune.py", clean=True, environ={"PYTHONPATH": f"{ROOT}:{tmp_path}"}).stderr
    assert words in told if words else told == ""


def test_large_data_is_apart_mapped_and_ones_own_to_change(tmp_path: Path) -> None:
    script = """
import numpy as np
LARGE, SMALL = np.arange(1_000_000.0), np.arange(10)
def objective(trial):
    LARGE[0] += 1
    return LARGE[0], LARGE[-1], SMALL.sum(), LARGE.flags.writeable
send(objective)
"""
    printed = there_and_back(tmp_path, script, "print(*objective(1))\nprint(*objective(1))").splitlines()
    assert printed == ["1.0 999999.0 45 True", "2.0 999999.0 45 True"]
    sizes = sorted(path.stat().st_size for path in (tmp_path / "sent").iterdir())
    assert sizes[-1] == 8_000_000
    assert sizes[-2] < 10_000
    told = run_python(tmp_path, "tune.py").stderr
    assert "the objective carries 8 MiB of data, sent once to each node: the objective reads LARGE (8 MiB)" in told
    # Whoever reads next finds what was sent.
    assert run(tmp_path, "replica.py").splitlines()[0] == "1.0 999999.0 45 True"


IN_A_HELPER = """import sqlite3
C = {'db': sqlite3.connect(':memory:')}
def helper():
    return C
def objective(trial):
    return helper()
send(objective)
"""
IN_AN_OBJECT = """class A:
    def __init__(self):
        self.rows = (each for each in 'ab')
    def __call__(self, trial):
        return 1
send(A())
"""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "import sqlite3\ndb = sqlite3.connect(':memory:')\nsend(lambda trial: db)",
            "the objective reads db, a sqlite3.Connection, cannot",
        ),
        (IN_A_HELPER, "the objective calls helper, which reads C['db'], a sqlite3.Connection, cannot"),
        (IN_AN_OBJECT, "the objective.rows, a generator, cannot"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_name_and_the_way_to_it(tmp_path: Path, script: str, words: str) -> None:
    (tmp_path / "tune.py").write_text(
        SENDS
        + "from tuner_bridge.errors import InvalidSweep\ntry:\n    "
        + script.replace("\n", "\n    ")
        + "\nexcept InvalidSweep as error:\n    print(error)\n"
    )
    printed = run(tmp_path, "tune.py")
    assert words.replace("cannot", "which cannot be sent to replicas: TypeError") in printed
    assert "Create it in the objective" in printed


def test_what_is_no_objective_is_refused() -> None:
    class Holder:
        pass

    for wrong, words in (
        (None, "the objective is None; pass a function"),
        (3, "pass a function"),
        (Holder, "is the class"),
    ):
        with pytest.raises(InvalidSweep, match=words):
            template_of(wrong, 1, 1)  # type: ignore[arg-type]  # that is the point


def test_code_that_is_damaged_or_of_another_python_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "tune.py").write_text(SENDS + "send(lambda trial: 1)")
    run(tmp_path, "tune.py")
    code = RECEIVES.replace("objective = ", "from tuner_bridge.errors import InvalidSweep\ntry:\n    objective = ")
    (tmp_path / "replica.py").write_text(code + "except InvalidSweep as error:\n    print(error)\n")
    document = json.loads((tmp_path / "sent" / "shipped.json").read_text())
    (tmp_path / "sent" / "shipped.json").write_text(json.dumps(document | {"python": "3.1"}))
    assert "the sweep was started with Python 3.1, and this node has" in run(tmp_path, "replica.py")
    (tmp_path / "sent" / "shipped.json").write_text(json.dumps(document))
    (tmp_path / "sent" / document["pickle"]).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert "the pickled code is damaged" in run(tmp_path, "replica.py")


def objective(trial: object) -> float:
    return 1.0


def test_a_function_of_a_module_goes_by_name_and_installed_packages_are_imported_beforehand() -> None:
    found = pickled(objective, "the objective")
    assert __name__ in found.modules
    template = template_of(objective, 1, 1)
    assert "pytest" in template.preload
    assert not [name for name in template.preload[:-1] if name.startswith("tuner_bridge")]
    assert set(template.code) == set(template.contents)


def imports_first(trial: object) -> float:
    """Import within itself, as many objectives do."""
    import json

    import hypothesis.strategies  # noqa: F401
    from rich import box  # noqa: F401

    value = float(json.loads("1"))
    import schemathesis  # noqa: F401

    return value


class Tunes:
    def __call__(self, trial: object) -> float:
        import hypothesis.strategies  # noqa: F401
        from rich import box  # noqa: F401

        return 1.0


@pytest.mark.parametrize("made", [imports_first, functools.partial(imports_first), Tunes()])
def test_what_an_objectives_body_begins_by_importing_is_imported_beforehand(made: Callable[[object], float]) -> None:
    preload = template_of(made, 1, 1).preload
    assert {"hypothesis.strategies", "rich"} <= set(preload)
    assert not {"json", "schemathesis"} & set(preload)
