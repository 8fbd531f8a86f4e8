"""What this machine has that slots are made of."""

from __future__ import annotations

from pathlib import Path

from trials.launch.slots import numa_nodes


def test_numa_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    for number, cores in ((0, "0-2,6"), (10, "8"), (2, "3-5")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores + "\n")
    assert numa_nodes(tmp_path) == ((0, 1, 2, 6), (3, 4, 5), (8,))
