"""Files that a query counts into a Parquet sink.

The expected output is computed from the input files, the actual output is read from the files that the sink's log
names; Spark has no part in either.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq

from stateflow.testing import LocalCluster
from tests.integration.support import read

SEED = 20130101
FILE_ROWS = 400
FIRST_FILE_S = 1_388_534_400


def write_file(directory: Path, number: int, rows: list[dict[str, Any]]) -> None:
    schema = pa.schema(
        [("seq", pa.int64()), ("k", pa.string()), ("kind", pa.string()), ("v", pa.int64()), ("pad", pa.string())]
    )
    hidden = directory / f".{number:05d}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema), hidden)
    os.utime(hidden, (FIRST_FILE_S + number, FIRST_FILE_S + number))  # the file source orders by these
    hidden.rename(directory / f"{number:05d}.parquet")


def some_rows(number: int, count: int = FILE_ROWS) -> list[dict[str, Any]]:
    """Makes wide rows: the 64 KiB that Spark hands a worker at once are only a part of a task's rows."""
    rng = random.Random(SEED + number)
    return [
        {
            "seq": number * count + i,
            "k": f"k{rng.randrange(40)}",
            "kind": rng.choice("abc"),
            "v": rng.randrange(-40, 60),
            "pad": "x" * 800,
        }
        for i in range(count)
    ]


class Expected:
    """Expected state and outputs: one thread with dictionaries reads the input files in their order."""

    def __init__(self, directory: Path) -> None:
        self.n: Counter[str] = Counter()
        self.total: Counter[str] = Counter()
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self.outputs: list[tuple[int, str, int, int]] = []
        for file in sorted(directory.glob("[0-9]*.parquet")):
            for row in pq.read_table(file).to_pylist():
                key, v = row["k"], row["v"]
                self.n[key] += 1
                self.total[key] += v
                self.by_kind[key, row["kind"]] += v
                self.outputs.append((row["seq"], key, self.n[key], self.total[key]))

    def check(self, local: LocalCluster, operator: str, output: Path) -> None:
        came = sink_rows(output)
        assert len(came) == len(self.outputs)
        assert came == sorted(self.outputs)
        wanted = {(key, None): n for key, n in self.n.items()}
        assert read(local.cluster, operator, "n") == wanted
        assert read(local.cluster, operator, "total") == {(key, None): total for key, total in self.total.items()}


def sink_rows(output: Path) -> list[tuple[int, str, int, int]]:
    """Reads the files named in the sink's log: files that a killed batch left beside them are not output."""
    log = output / "_spark_metadata"
    numbers = {int(path.name.partition(".")[0]): path for path in log.iterdir() if path.name[0].isdigit()}
    compacted = {number for number, path in numbers.items() if path.name.endswith(".compact")}
    files: list[Path] = []
    for number in range(max(compacted, default=0), max(numbers) + 1):
        for line in numbers[number].read_text().splitlines()[1:]:
            files.append(Path(unquote(urlparse(json.loads(line)["path"]).path)))
    assert len(set(files)) == len(files)
    return sorted(tuple(row.values()) for file in files for row in pq.ParquetFile(file).read().to_pylist())
