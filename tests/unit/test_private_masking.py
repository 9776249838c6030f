"""Masking of secrets in URLs, anywhere in a text."""

from __future__ import annotations

import pytest

from stateflow.private import is_masked, masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://ann:hunter2@host/dir", "sftp://ann:***@host/dir"),
        ("mysql+pymysql://u:p%40ss@db:3306/x failed", "mysql+pymysql://u:***@db:3306/x failed"),
        ("ftp://:onlypassword@host", "ftp://:***@host"),
        ("https://h/x?token=abc&n=1", "https://h/x?token=***&n=1"),
        ("https://h/x?n=1&X-Amz-Signature=abc)", "https://h/x?n=1&X-Amz-Signature=***)"),
        ("two: a://u:p@h, b://u:q@h", "two: a://u:***@h, b://u:***@h"),
        ("/var/lib/checkpoints", "/var/lib/checkpoints"),
        ("s3://bucket/prefix:with@signs", "s3://bucket/prefix:with@signs"),
        ("127.0.0.1:7070 10:30", "127.0.0.1:7070 10:30"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked(shown) == shown
    assert is_masked(shown) is (text != shown)
