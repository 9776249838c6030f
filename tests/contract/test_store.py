from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stateflow.changes import Mutations
from stateflow.errors import StateMissing, Unavailable
from stateflow.storage import MemoryStore, PartitionStore, RocksEngine
from tests.contract.store_suite import StoreContract, prefix_end_is_exact


def test_prefix_end() -> None:
    prefix_end_is_exact()


class TestMemoryStore(StoreContract):
    def make(self, directory: Path) -> PartitionStore:
        return MemoryStore()

    def open(self, directory: Path) -> PartitionStore:
        return MemoryStore.open(directory)


class TestRocksStore(StoreContract):
    engine = RocksEngine(8 << 20, 8 << 20)

    def make(self, directory: Path) -> PartitionStore:
        return self.engine.open(directory, create=True)

    def open(self, directory: Path) -> PartitionStore:
        return self.engine.open(directory)

    def test_it_survives_being_closed(self, tmp_path: Path) -> None:
        store = self.make(tmp_path / "db")
        store.apply(Mutations(puts=[(b"a", b"1")]))
        store.close()
        again = self.open(tmp_path / "db")
        assert list(again.scan(b"")) == [(b"a", b"1")]
        again.close()

    def test_entries_that_are_overwritten_again_and_again_are_not_many(self, tmp_path: Path) -> None:
        store = self.make(tmp_path / "db")
        for value in range(100):
            store.apply(Mutations(puts=[(b"%02d" % n, b"%d" % value) for n in range(50)]))
            if value == 1:
                assert store.entries() is None, "nothing is in a file"
                store.flush()
        assert store.entries() == 50, "writes that are in no file do not count"
        store.flush()
        entries = store.entries()
        assert entries is not None
        assert 50 <= entries <= 100, "once in each file"
        store.close()
        assert store.entries() is None

    def test_a_given_up_scan_does_not_keep_the_database_locked(self, tmp_path: Path) -> None:
        store = self.make(tmp_path / "db")
        store.apply(Mutations(puts=[(b"%05d" % n, b"") for n in range(5000)]))
        entries = store.scan(b"")
        next(entries)
        del entries
        store.close()
        self.open(tmp_path / "db").close()

    def test_closing_waits_for_the_call_of_another_thread(self, tmp_path: Path) -> None:
        """Closing a store while another thread writes raises nothing; the write may fail, as the store is closed."""
        for attempt in range(20):
            store, writing = self.make(tmp_path / f"db{attempt}"), threading.Event()

            def write(store: PartitionStore = store, writing: threading.Event = writing) -> None:
                with pytest.raises(Exception, match="closed"):
                    for _ in range(1000):
                        store.apply(Mutations(puts=[(b"%05d" % n, bytes(200)) for n in range(500)]), sync=True)
                        writing.set()

            with ThreadPoolExecutor(1) as pool:
                written = pool.submit(write)
                assert writing.wait(30)
                store.close()
                written.result(30)
            self.open(tmp_path / f"db{attempt}").close()

    @pytest.mark.parametrize("sync", [False, True])
    def test_what_was_applied_survives_a_kill(self, tmp_path: Path, sync: bool) -> None:
        program = f"""
import os, pathlib, signal
from stateflow.changes import Mutations
from stateflow.storage import RocksEngine
store = RocksEngine(8 << 20, 8 << 20).open(pathlib.Path({str(tmp_path / "db")!r}), create=True)
for n in range(100):
    store.apply(Mutations(puts=[(b"n", b"%d" % n), (b"k%d" % n, b"x" * 100)]), sync={sync})
os.kill(os.getpid(), signal.SIGKILL)
"""
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert run.returncode == -9, run.stderr
        store = self.open(tmp_path / "db")
        assert store.get(b"n") == b"99"
        assert len(list(store.scan(b"k"))) == 100
        store.close()

    def test_a_log_cut_in_the_middle_of_a_batch_loses_the_batch_whole(self, tmp_path: Path) -> None:
        store = self.make(tmp_path / "db")
        for n in range(20):
            store.apply(Mutations(puts=[(b"a", b"%d" % n), (b"b", b"%d" % n)]))
        store.snapshot(tmp_path / "copy-of-files-only")  # flushes, so that the log holds only what follows
        for n in range(20, 40):
            store.apply(Mutations(puts=[(b"a", b"%d" % n), (b"b", b"%d" % n)]))
        logs = [path for path in (tmp_path / "db").glob("*.log") if path.stat().st_size]
        newest = max(logs, key=lambda path: path.name)
        crashed = tmp_path / "crashed"
        subprocess.run(["cp", "-r", str(tmp_path / "db"), str(crashed)], check=True)
        (crashed / "LOCK").unlink()
        store.close()
        with (crashed / newest.name).open("r+b") as file:
            file.truncate((crashed / newest.name).stat().st_size - 7)
        again = self.open(crashed)
        a, b = again.get(b"a"), again.get(b"b")
        assert a == b, "half a batch"
        assert a is not None
        assert 19 <= int(a) < 39
        again.close()

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(StateMissing) as caught:
            self.open(tmp_path / "nowhere")
        assert caught.value.where["path"] == tmp_path / "nowhere"
        assert not (tmp_path / "nowhere").exists()

    def test_a_database_that_is_open_elsewhere(self, tmp_path: Path) -> None:
        store = self.make(tmp_path / "db")
        code = (
            "import sys; from pathlib import Path; from stateflow.storage import RocksEngine; "
            "RocksEngine().open(Path(sys.argv[1]))"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "db")], stderr=subprocess.PIPE, text=True, check=False
        )
        assert "DataDirLocked" in other.stderr
        store.close()
        self.open(tmp_path / "db").close()

    def test_a_database_that_a_reader_holds_open_can_be_opened_later(self, tmp_path: Path) -> None:
        store = self.make(tmp_path / "db")
        store.apply(Mutations(puts=[(b"a", b"1"), (b"b", b"2")]))
        reader = store.scan(b"")
        next(reader)
        store.close()
        with pytest.raises(Unavailable, match="a reader of this process") as caught:
            self.open(tmp_path / "db")
        assert caught.value.retryable
        del reader
        again = self.open(tmp_path / "db")
        assert again.get(b"b") == b"2"
        again.close()
