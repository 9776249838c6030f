"""Expected result of the convoys' operator, computed a second time by other means: grouped sums over all rows that were
ever told, with no running state, and nothing of the framework. All are whole numbers, so that everything is equal or is
not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from stateflow.demo.reference import DIFFERENCES_SHOWN, Comparison

OUTPUTS = ["seq", "vehicle", "way", "told", "metres"]
FACTS = ["vehicle", "fact", "value"]


def expected_outputs(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns one output for each row, in the order of ``seq``."""
    told = pd.DataFrame.from_records(list(rows)).sort_values("seq", ignore_index=True)
    by_way = told.groupby(["vehicle", "way"], sort=False)
    told["told"] = by_way.cumcount() + 1
    told["metres"] = by_way["metres"].cumsum()
    return told[OUTPUTS]


def expected_state(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns what is known of each vehicle in the end, a fact a row."""
    told = pd.DataFrame.from_records(list(rows))
    sums = told.groupby(["vehicle", "way"])["metres"].agg(["size", "sum"]).reset_index()
    where = told.groupby("vehicle")["site"].agg(lambda sites: "+".join(sorted(set(sites)))).reset_index()
    return pd.concat(
        [
            _facts(sums["vehicle"], "told by " + sums["way"], sums["size"]),
            _facts(sums["vehicle"], "metres by " + sums["way"], sums["sum"]),
            _facts(where["vehicle"], pd.Series(["sites"] * len(where)), where["site"]),
        ],
        ignore_index=True,
    )


def state_facts(
    told: Iterable[Mapping[str, Any]], metres: Iterable[Mapping[str, Any]], sites: Iterable[Mapping[str, Any]]
) -> pd.DataFrame:
    """Returns the same facts from the states as they are read, an entry a row."""
    facts = [(row["key"], f"told by {row['map_key']}", str(row["value"])) for row in told]
    facts += [(row["key"], f"metres by {row['map_key']}", str(row["value"])) for row in metres]
    where: dict[str, set[str]] = {}
    for row in sites:
        where.setdefault(row["key"], set()).add(row["map_key"])
    facts += [(vehicle, "sites", "+".join(sorted(seen))) for vehicle, seen in where.items()]
    return pd.DataFrame(facts, columns=FACTS)


def compare(wanted: pd.DataFrame, found: pd.DataFrame, by: list[str]) -> Comparison:
    """Compares row by row, in any order.

    Args:
        by: columns that name a row.
    """
    copies = found.duplicated(by)
    both = wanted.merge(found[~copies], on=by, how="outer", suffixes=("", " found"), indicator="where")
    values = [column for column in wanted.columns if column not in by]
    here = both["where"] == "both"
    wrong = here & pd.concat([both[name] != both[f"{name} found"] for name in values], axis=1).any(axis=1)
    missing, extra = both[both["where"] == "left_only"], both[both["where"] == "right_only"]
    lines = [f"{_named(row, by)}: expected, absent" for row in _first(missing)]
    lines += [f"{_named(row, by)}: not expected, present" for row in _first(extra)]
    lines += [f"{_named(row, by)}: duplicated" for row in _first(found[copies])]
    for row in _first(both[wrong]):
        for name in values:
            want, got = row[name], row[f"{name} found"]
            if want != got:
                lines.append(f"{_named(row, by)}: {name}: expected {_said(want)}, got {_said(got)}")
    surplus = len(extra) + int(copies.sum())
    return Comparison(
        equal=not (len(missing) or surplus or wrong.any()),
        compared=int(here.sum()),
        missing=len(missing),
        extra=surplus,
        different=int(wrong.sum()),
        differences=lines[:DIFFERENCES_SHOWN],
    )


def _facts(vehicles: pd.Series[Any], facts: pd.Series[Any], values: pd.Series[Any]) -> pd.DataFrame:
    return pd.DataFrame({"vehicle": vehicles, "fact": facts, "value": values.astype(str)})


def _first(rows: pd.DataFrame) -> list[dict[Any, Any]]:
    return rows.head(DIFFERENCES_SHOWN).to_dict("records")


def _named(row: Mapping[Any, Any], by: list[str]) -> str:
    return " ".join(f"{name} {row[name]}" for name in by)


def _said(value: Any) -> Any:
    """Returns whole numbers as such: a column with a gap in it has them as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
