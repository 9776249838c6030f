"""Bundles: what is loaded from them, isolated from each other and from the modules of the process."""

from __future__ import annotations

import io
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from stateflow.code.bundles import UNPACKED_MAX, BundleStore, check, digest_of, package_of
from stateflow.errors import BundleDamaged, BundleMissing, OperatorNotImportable
from stateflow.operator.operator import load


def zipped(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, textwrap.dedent(text))
    return buffer.getvalue()


def shop(price: int) -> dict[str, str]:
    """Makes a package whose modules import each other in every possible way."""
    return {
        "code/shop/__init__.py": "",
        "code/shop/prices.py": f"PRICE = {price}\ncalls = []\n",
        "code/shop/later.py": "from shop.prices import PRICE\n",
        "code/shop/deep/inner.py": "from ..prices import PRICE\nfrom extra import *\n",
        "code/shop/ops.py": """
            import json
            import shop
            import shop.prices
            import shop.prices as named
            from shop import later, prices
            from shop.deep.inner import WORD
            from . import prices as relative
            from stateflow import Operator


            class Priced(Operator):
                key = "k"
                output = "k string, price long"

                def process(self, row, ctx):
                    import shop.later as lazy
                    from shop.prices import PRICE
                    prices.calls.append(row)
                    assert prices is named is relative is shop.prices
                    return {"k": WORD, "price": (PRICE, later.PRICE, lazy.PRICE, len(prices.calls))}
        """,
        "lib/extra.py": "__all__ = ['WORD']\nWORD = 'extra'\nhidden = 1\n",
    }


def loaded(store: BundleStore, packed: bytes) -> Any:
    digest = digest_of(packed)
    store.keep(digest, packed)
    return load("shop.ops:Priced", "", package_of(digest, store.opened(digest)))


def test_two_versions_are_side_by_side_and_nobody_else_sees_them(tmp_path: Path) -> None:
    store = BundleStore(tmp_path)
    one, two = loaded(store, zipped(shop(1))), loaded(store, zipped(shop(2)))
    assert one is not two
    assert one().process({}, None) == {"k": "extra", "price": (1, 1, 1, 1)}
    assert two().process({}, None) == {"k": "extra", "price": (2, 2, 2, 1)}, "what the one changes the other has not"
    assert one().process({}, None)["price"][3] == 2
    assert "shop" not in sys.modules
    assert "extra" not in sys.modules
    assert loaded(store, zipped(shop(1))) is one, "one class, wherever it is loaded"


def test_what_a_text_imports_may_come_in_a_bundle(tmp_path: Path) -> None:
    store, packed = BundleStore(tmp_path), zipped({"lib/extra.py": "WORD = 'of the text'\n"})
    store.keep(digest_of(packed), packed)
    text = textwrap.dedent(
        """
        from stateflow import Operator
        from extra import WORD

        class Reads(Operator):
            key, output = "k", "k string"

            def process(self, row, ctx):
                return {"k": WORD}
        """
    )
    package = package_of(digest_of(packed), store.opened(digest_of(packed)))
    assert load("script.py:Reads", text, package)().process({}, None) == {"k": "of the text"}
    with pytest.raises(OperatorNotImportable, match="extra"):
        load("script.py:Reads", text)


def test_what_it_lacks_is_named(tmp_path: Path) -> None:
    files = shop(3) | {"code/shop/later.py": "import nowhere_to_be_found\n"}
    with pytest.raises(OperatorNotImportable, match="nowhere_to_be_found"):
        loaded(BundleStore(tmp_path), zipped(files))
    files = shop(4) | {"code/shop/later.py": "from shop.prices import MISSING\n"}
    with pytest.raises(OperatorNotImportable, match="MISSING"):
        loaded(BundleStore(tmp_path), zipped(files))


def test_a_kept_one_that_was_changed_is_none(tmp_path: Path) -> None:
    packed = zipped(shop(5))
    digest = digest_of(packed)
    BundleStore(tmp_path).keep(digest, packed)
    assert BundleStore(tmp_path).has(digest)
    file = tmp_path / f"{digest}.zip"
    file.write_bytes(packed[:100] + bytes([packed[100] ^ 1]) + packed[101:])
    again = BundleStore(tmp_path)
    assert not again.has(digest)
    with pytest.raises(BundleMissing):
        again.opened(digest)
    again.keep(digest, packed)
    (again.opened(digest) / "code" / "shop" / "ops.py").write_text("raise SystemExit")
    assert "class Priced" in (BundleStore(tmp_path).opened(digest) / "code" / "shop" / "ops.py").read_text()


def test_only_what_is_named_stays(tmp_path: Path) -> None:
    one, two = zipped(shop(6)), zipped(shop(7))
    store = BundleStore(tmp_path)
    for packed in (one, two):
        store.keep(digest_of(packed), packed)
    store.opened(digest_of(two))
    again = BundleStore(tmp_path)
    again.keep_only({digest_of(one)})
    assert [path.name for path in tmp_path.iterdir()] == [f"{digest_of(one)}.zip"]


@pytest.mark.parametrize("name", ["../up.py", "code/../../up.py", "/etc/up.py", "elsewhere/up.py", "code\\..\\up.py"])
def test_nothing_is_written_outside(tmp_path: Path, name: str) -> None:
    packed = zipped({name: ""})
    with pytest.raises(BundleDamaged, match="outside its directories"):
        BundleStore(tmp_path / "store").keep(digest_of(packed), packed)


def test_what_is_no_bundle_is_refused() -> None:
    with pytest.raises(BundleDamaged, match="cannot be read"):
        check(b"nothing", digest_of(b"nothing"))
    with pytest.raises(BundleDamaged, match="its digest is not the deployed one"):
        check(zipped(shop(1)), "0" * 64)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("code/bomb.py", b"\0" * (UNPACKED_MAX + 1))
    with pytest.raises(BundleDamaged, match="more than"):
        check(buffer.getvalue(), digest_of(buffer.getvalue()))
