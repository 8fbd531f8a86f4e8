"""`python -m benchmarks.run [NAME ...]`: run the named benchmarks, or all, one after another."""

from __future__ import annotations

import argparse

from benchmarks import (
    adapter_batches,
    adapters,
    autoscaling,
    batch_choice,
    besieged,
    cheap_trials,
    checkpoint_stall,
    cluster_at_size,
    cluster_tick,
    command_line,
    decision_time,
    digits_accuracy,
    eight_weeks,
    exactly_once,
    fit_speed,
    forks,
    gpu,
    half_hour,
    import_time,
    larger_models,
    late_imports,
    launches,
    lightning_overhead,
    live_sweeps,
    many_trials,
    partitions,
    pollux_workloads,
    populations,
    power_mean,
    prepared_data,
    reductions,
    rescale_pause,
    slurm_queue,
    step_overhead,
    sweep_against_optuna,
    sweep_cpu,
    sweeps,
    sweeps_in_a_row,
    trainer_overhead,
    trainer_search,
    tuning_experiment,
    web_page,
)
from benchmarks.frame import Benchmark, run

BENCHMARKS: dict[str, Benchmark] = {
    module.__name__.removeprefix("benchmarks."): module.measure
    for module in (
        import_time,
        fit_speed,
        batch_choice,
        exactly_once,
        checkpoint_stall,
        forks,
        populations,
        reductions,
        step_overhead,
        trainer_overhead,
        trainer_search,
        lightning_overhead,
        rescale_pause,
        adapters,
        adapter_batches,
        digits_accuracy,
        sweep_against_optuna,
        sweep_cpu,
        launches,
        late_imports,
        many_trials,
        partitions,
        larger_models,
        prepared_data,
        cheap_trials,
        command_line,
        decision_time,
        cluster_tick,
        cluster_at_size,
        besieged,
        eight_weeks,
        half_hour,
        pollux_workloads,
        power_mean,
        sweeps,
        live_sweeps,
        sweeps_in_a_row,
        tuning_experiment,
        autoscaling,
        web_page,
        slurm_queue,
        gpu,
    )
}
UNNAMED = [name for name in BENCHMARKS if name != "gpu"]
"""Benchmarks that run when none is named."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(BENCHMARKS)}")
    names = parser.parse_args().names or UNNAMED
    for name in names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark is called {name!r}; choose from {', '.join(BENCHMARKS)}")
    for name in names:
        run(name, BENCHMARKS[name])


if __name__ == "__main__":
    main()
