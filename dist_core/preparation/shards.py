"""Shards of rows as Arrow files: written a part at a time, and read where they lie, without a copy.

A column of arrays of two or more dimensions has one shape; of one dimension, any lengths. Other values are what Arrow
makes of them: numbers, texts, bytes, lists.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dist_core.errors import InvalidTraining

BATCH_BYTES = 8 << 20
"""About so much is kept in memory before it is written."""

Row = Mapping[str, Any]


def write_shard(path: Path, rows: Iterable[Row], *, what: str) -> int:
    """Write, flush and rename; the number of rows. Raises OSError, and InvalidTraining for rows that fit no table."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    number = 0
    try:
        with open(partial, "wb") as file:
            several = _several_at_once(rows, what)
            first = next(several, None)
            if first is not None:
                schema = pa.schema([(name, _type_of(values)) for name, values in first.items()])
                with pa.ipc.new_file(file, schema) as writer:
                    for columns in itertools.chain([first], several):
                        batch = _batch(columns, schema, what)
                        writer.write_batch(batch)
                        number += batch.num_rows
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return number


def _several_at_once(rows: Iterable[Row], what: str) -> Iterator[dict[str, list[Any]]]:
    """Yield the values of a number of rows, by their names."""
    columns: dict[str, list[Any]] = {}
    size = 0
    for row in rows:
        if not isinstance(row, Mapping) or (columns and row.keys() != columns.keys()):
            names = sorted(row) if isinstance(row, Mapping) else type(row).__name__
            raise InvalidTraining(
                f"{what} yielded a row of {names}, but its first row was of {sorted(columns)}; each row must be a "
                "dictionary with the same names"
            )
        for name, value in row.items():
            plain = _plain(value)
            columns.setdefault(name, []).append(plain)
            size += plain.nbytes if isinstance(plain, np.ndarray) else 64
        if size >= BATCH_BYTES:
            yield columns
            columns, size = {name: [] for name in columns}, 0
    if any(columns.values()):
        yield columns


def _batch(columns: Mapping[str, list[Any]], schema: Any, what: str) -> Any:
    arrays = []
    for field in schema:
        values = columns[field.name]
        try:
            if isinstance(field.type, pa.FixedShapeTensorType):
                arrays.append(pa.FixedShapeTensorArray.from_numpy_ndarray(_stacked(values, field.type)))
            else:
                arrays.append(pa.array(values, field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError, TypeError, OverflowError) as error:
            raise InvalidTraining(
                f"{what}: the values of {field.name!r} do not fit a column of {field.type}, the type of the first "
                f"row ({error}); give all rows values of one type, and arrays of several dimensions one shape"
            ) from None
    return pa.record_batch(arrays, schema=schema)


def _stacked(values: list[Any], kind: Any) -> Any:
    shape, dtype = tuple(kind.shape), kind.value_type.to_pandas_dtype()
    for value in values:
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
            raise ValueError(f"one is {_described(value)}")
    return np.ascontiguousarray(np.stack(values))


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _plain(value: Any) -> Any:
    """Tensors as arrays, arrays of one number as numbers."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:
        return value.item()
    return value


def _type_of(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray) and first.ndim > 1:
        return pa.fixed_shape_tensor(pa.from_numpy_dtype(first.dtype), first.shape)
    if isinstance(first, np.ndarray):
        return pa.list_(pa.from_numpy_dtype(first.dtype))
    try:
        return pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        # Of which kind the first one is, so that the message can say which are not.
        return pa.scalar(first).type


class PreparedData:
    """The rows of all parts, in their order, as dictionaries; what a DataLoader takes for a dataset.

    Arrays are NumPy's, each a copy of its row; the files are mapped into memory, of which a machine has one copy
    however many processes open them.
    """

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name = name
        self.paths = tuple(paths)
        self._open()

    def _open(self) -> None:
        tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in self.paths if path.stat().st_size]
        alike = all(table.schema == tables[0].schema for table in tables)
        # Where one part has whole numbers only, say, and another one others.
        self.table = (
            pa.concat_tables(tables, promote_options="none" if alike else "permissive") if tables else pa.table({})
        )
        """All of it, as Arrow's."""
        batches = self.table.to_batches()
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self._columns = [{name: _column(batch.column(name)) for name in batch.schema.names} for batch in batches]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"{self.name} has {size} rows, so there is no row {index}")
        place = int(index) % size
        batch = int(np.searchsorted(self._starts, place, side="right")) - 1
        row = place - int(self._starts[batch])
        return {name: read(row) for name, read in self._columns[batch].items()}

    def as_datasets(self) -> Any:
        """Return the same files as a Hugging Face ``datasets.Dataset``."""
        from datasets import Dataset

        columns = {
            name: pa.chunked_array([_nested(chunk) for chunk in self.table.column(name).chunks])
            for name in self.table.column_names
        }
        return Dataset(pa.table(columns))

    def __getstate__(self) -> dict[str, Any]:
        # A worker of a DataLoader maps the files for itself.
        return {"name": self.name, "paths": self.paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.name, self.paths = state["name"], state["paths"]
        self._open()


def _nested(array: Any) -> Any:
    """Tensors as lists in lists of the same memory, which more libraries know."""
    if not isinstance(array.type, pa.FixedShapeTensorType):
        return array
    values = array.storage.flatten()
    for length in reversed(array.type.shape):
        values = pa.FixedSizeListArray.from_arrays(values, length)
    return values


def _column(array: Any) -> Any:
    if isinstance(array.type, pa.FixedShapeTensorType):
        stacked = array.to_numpy_ndarray()
        return lambda row: stacked[row].copy()
    if pa.types.is_list(array.type) and pa.types.is_primitive(array.type.value_type) and not array.null_count:
        flat, offsets = array.values.to_numpy(zero_copy_only=False), array.offsets.to_numpy()
        return lambda row: flat[offsets[row] : offsets[row + 1]].copy()
    return lambda row: array[row].as_py()
