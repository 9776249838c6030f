"""What the PySpark that is here lacks: tests of it are skipped there, and say why."""

from __future__ import annotations

import pyspark
import pytest

from stateflow.spark.versions import Feature


def lacks(feature: Feature) -> str:
    """Why it cannot be; empty: it can."""
    return "" if feature.is_in(pyspark.__version__) else f"{feature.needs()}, and this is {pyspark.__version__}"


def needs(feature: Feature) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(lacks(feature)), reason=lacks(feature) or "it is here")
