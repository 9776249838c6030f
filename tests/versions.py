"""Features that the installed PySpark lacks; their tests are skipped, with the reason."""

from __future__ import annotations

import pyspark
import pytest

from stateflow.spark.session import Feature


def lacks(feature: Feature) -> str:
    """Returns why the installed PySpark lacks a feature; empty: it has it."""
    return "" if feature.is_in(pyspark.__version__) else f"{feature.needs()}, and this is {pyspark.__version__}"


def needs(feature: Feature) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(lacks(feature)), reason=lacks(feature) or "it is here")
