"""`python -m benchmarks.run [NAME ...]`: run the named benchmarks, or all, one after another."""

from __future__ import annotations

import argparse

from benchmarks import fit_speed, rescale_pause, step_overhead, sweep_against_optuna
from benchmarks.frame import Benchmark, run

BENCHMARKS: dict[str, Benchmark] = {
    "fit_speed": fit_speed.measure,
    "rescale_pause": rescale_pause.measure,
    "step_overhead": step_overhead.measure,
    "sweep_against_optuna": sweep_against_optuna.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(BENCHMARKS)}")
    names = parser.parse_args().names or list(BENCHMARKS)
    for name in names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark is called {name!r}; choose from {', '.join(BENCHMARKS)}")
    for name in names:
        run(name, BENCHMARKS[name])


if __name__ == "__main__":
    main()
