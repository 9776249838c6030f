"""Decoders accept sound input and refuse every input found so far, and the engine finds a planted mistake."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.doors import CASES, CORPUS, DOORS, Defect, Door, _corpus
from tests.property.arrow_mutants import damaged
from tests.sizes import sized

PLANTED = """
import sys
from pathlib import Path
import atheris
from tests.fuzz import engine
from tests.fuzz.doors import DOORS, Door

@atheris.instrument_func
def mistaken(data: bytes) -> None:
    if data[:2] == b"OK" and data[2] == 7:  # an IndexError, where it ends there
        raise RuntimeError("planted")

DOORS["planted"] = Door("planted", mistaken, lambda: [b"OK\\x00"])
engine.main("planted", 200_000, 1, Path(sys.argv[1]), Path(sys.argv[1]))
"""


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_what_is_sound_comes_in(door: Door) -> None:
    let_in = [door(data) for data in door.sound()]
    assert any(let_in)
    if door.name not in (
        "messages",
        "stored",
        "texts",
        "certificates",
        "stores",
    ):  # of which each is sound to one reader of several
        assert all(let_in)


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")  # of the next release
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_what_is_damaged_is_let_in_or_refused(door: Door) -> None:
    chance, sound = random.Random(door.name), list(door.sound())
    let_in = []
    for _ in range(sized(max(20, int(3000 * door.weight)))):
        data = chance.choice(sound)
        let_in.append(door(damaged(data, chance) if data else bytes(chance.randrange(256) for _ in range(9))))
    assert not all(let_in), "a door that lets all in guards nothing"


def test_what_was_found_is_refused_since() -> None:
    found = {path.parent.name for path in CASES.glob("*/*")}
    assert found
    assert found <= set(DOORS)
    for name in found:
        for data in DOORS[name].cases():
            DOORS[name](data)


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")  # of the next release
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_what_reaches_more_code_is_let_in_or_refused(door: Door) -> None:
    for data in door.corpus():
        door(data)


def test_the_corpus_is_small_and_of_doors_that_there_are() -> None:
    assert _corpus().keys() <= DOORS.keys()
    assert sum(map(len, _corpus().values())) > 300
    assert CORPUS.stat().st_size < 200_000


def test_an_error_that_is_not_said_in_one_line_is_a_defect() -> None:
    from stateflow.errors import InvalidArgument

    def long(data: bytes) -> None:
        raise InvalidArgument("x" * 5000, remedy="none")

    with pytest.raises(Defect, match="not said in one line"):
        Door("d", long, lambda: [b""])(b"")


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed here")
@pytest.mark.thorough
def test_the_engine_finds_what_is_planted(tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    folder = tmp_path / "corpus"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(script), f"{folder}/"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""},
        check=False,
    )
    assert done.returncode != 0, done.stderr[-2000:]
    assert "planted" in done.stdout or "IndexError" in done.stdout
