"""Every reader of bytes from elsewhere.

A door takes any bytes, and returns what they hold or raises a StateflowError of one line. It raises nothing else, and
never hangs.
"""

from __future__ import annotations

import atexit
import base64
import binascii
import datetime as dt
import decimal
import hashlib
import io
import json
import shutil
import struct
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import xxhash
import zstandard
from google.protobuf.message import DecodeError as NotParsed
from google.protobuf.message import Message

from reconfig.decisions.jobs import Affinity as JobAffinity
from stateflow import documents, reports, status
from stateflow.changes import ChangeSet, Mutations
from stateflow.checkpoint.catalog import Manifest, parse_name
from stateflow.checkpoint.codec import Codec
from stateflow.client.commands import keys_meant
from stateflow.client.history import PLAIN_MAX, History, _decoded
from stateflow.clock import SYSTEM_CLOCK
from stateflow.code import bundles
from stateflow.dashboard.acts import Lookup, Move, Named, Sweep, read_body
from stateflow.durable import MALFORMED
from stateflow.errors import StateflowError
from stateflow.fleet import heard
from stateflow.ledger.rules import check_affinity
from stateflow.local.embedded import FILE as EMBEDDED
from stateflow.local.embedded import said_in
from stateflow.operator.arrow import parse_ddl, read_batch, read_schema, read_table
from stateflow.operator.operator import describe
from stateflow.operator.output import join_output, split_output
from stateflow.operator.rows import RowReader, alone
from stateflow.partition import layout
from stateflow.partition.change_feed import Seal, SnapshotInfo
from stateflow.partition.data_directory import FILE as IDENTITY
from stateflow.partition.data_directory import NOTE
from stateflow.partition.data_directory import _read as read_identity
from stateflow.partition.data_directory import _read_note as read_note
from stateflow.partition.positions import Retired, SourceView
from stateflow.partition.registry import ALONE, TERM, PartitionRegistry
from stateflow.partition.running import CRASHES, RUNNING, Crashes
from stateflow.partitioner import partition_of
from stateflow.release import release_of
from stateflow.replica.streams import FrameReader
from stateflow.rpc import agent_pb2, common_pb2, controller_pb2, faults, replica_pb2, wire
from stateflow.rpc.clients import addresses_of, packed_deployment, unpacked_deployment
from stateflow.rpc.fields import checked
from stateflow.schedule import Schedule
from stateflow.security.authority import Authority
from stateflow.security.certificates import PREFIX, checked_pair, decoded_token, read_certificates, revoked_of
from stateflow.security.roles import Identity
from stateflow.settings import ReplicaSettings
from stateflow.state import cells, encoding
from stateflow.state.declare import coder_for
from stateflow.state.tracked import DECODE_FAILURES
from stateflow.storage import commit_log as log_format
from stateflow.storage.faults import meaning
from stateflow.storage.store import RocksEngine
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo
from tests.integration.operators import Tally
from tests.property.arrow_mutants import ROWS, SCHEMA

LINE_MAX = 2000
CASES = Path(__file__).parent / "cases"
#: corpora of the doors: msgpack of door → inputs, compressed. ``python -m tests.fuzz --keep`` writes it
CORPUS = Path(__file__).parent / "corpus.zst"
#: longest input of a corpus that is kept, in bytes
KEPT_BYTES_MAX = 4096


@cache
def folder_of_this_process() -> Path:
    """Makes the folder for files of doors; it is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="stateflow-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Defect(AssertionError):
    """Behaviour that no door may show."""


@dataclass(frozen=True)
class Door:
    """A reader of bytes.

    ``sound``: makes valid inputs, from which others are made. ``weight``: share of all inputs, relative to the other
    doors'.
    """

    name: str
    enter: Callable[[bytes], object]
    sound: Callable[[], Iterable[bytes]]
    weight: float = 1.0

    def __call__(self, data: bytes) -> bool:
        """Tells whether the door let the bytes in. Raises Defect, and any other error that the door raises."""
        try:
            self.enter(data)
        except StateflowError as error:
            check_line(error)
            return False
        return True

    def cases(self) -> list[bytes]:
        """Returns the inputs that were findings once."""
        return [path.read_bytes() for path in sorted((CASES / self.name).glob("*"))]

    def corpus(self) -> list[bytes]:
        """Returns inputs that an earlier run has made, and that reach more code than the sound ones."""
        return _corpus().get(self.name, [])


@cache
def _corpus() -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = msgpack.unpackb(zstandard.decompress(CORPUS.read_bytes()))
    return found


def keep(made: Mapping[str, Iterable[bytes]]) -> None:
    """Keeps the corpus of these doors, in place of their former one. Inputs that are long are left out."""
    kept = dict(_corpus()) if CORPUS.exists() else {}
    for name, inputs in made.items():
        known = {*DOORS[name].sound(), *DOORS[name].cases()}
        kept[name] = sorted({each for each in inputs if len(each) <= KEPT_BYTES_MAX} - known)
    CORPUS.write_bytes(zstandard.compress(msgpack.packb(dict(sorted(kept.items()))), 19))


def check_line(error: StateflowError) -> None:
    """Checks that an error is one printable line. Raises Defect."""
    said = str(error)
    if not said.isprintable() or len(said) > LINE_MAX:
        raise Defect(f"it is not said in one line: {said[:LINE_MAX]!r}") from error


def each(*decoders: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """Combines decoders; the result refuses input that all of them refuse."""

    def enter(data: bytes) -> None:
        refusals: list[StateflowError] = []
        for decode in decoders:
            try:
                decode(data)
            except StateflowError as error:
                check_line(error)
                refusals.append(error)
        if len(refusals) == len(decoders):
            raise refusals[0]

    return enter


# -- change sets, entries, outputs --------------------------------------------------------------------------


def change_set(data: bytes) -> None:
    ChangeSet.decode(data + xxhash.xxh64_digest(data))  # an attacker can add the digest, too


def sound_change_sets() -> Iterator[bytes]:
    for count in (0, 1, 40):
        mutations = Mutations([(b"a%d" % n, b"b") for n in range(count)], [b"c"] * (count > 0), [(b"d", b"e")])
        yield ChangeSet("Op", 1, 2, 3, "s", 4, mutations).encode()[:-8]


def sound_entries() -> Iterator[bytes]:
    yield layout.Position(3, attempt=layout.Attempt("r", "u", "t", "c"), known=b"x").encode()
    yield layout.Ownership("r", "OWNED", 3, "m").encode()
    yield layout.Session(5, "id").encode()
    yield Retired(7, 5).encode() if hasattr(Retired, "encode") else msgpack.packb([1, 7, 5])


def sound_known() -> Iterator[bytes]:
    for partitions in KNOWN_PARTITIONS:
        history = History("Op", "s", partitions, 1 << 20)
        yield history.known(layout.Session(5, "id"), 3, [0, 2])
        history.resume({0: 7, 1: 3}, [history.known(layout.Session(5, "id"), 7, [0, 1])])
        yield history.known(layout.Session(6, "id"), 8, range(partitions))


#: numbers of partitions, whose entries have different forms
KNOWN_PARTITIONS = (4, PLAIN_MAX + 2)


# -- checkpoints --------------------------------------------------------------------------------------------

KEY = bytes(range(32))
FILE = {"name": "CURRENT", "size": 1, "digest": "0" * 32, "blob": ""}
MANIFEST: dict[str, Any] = {
    "format": 2,
    **{"operator": "Op", "partition": 0, "epoch": 1, "sequence": 1, "digest": "0" * 32, "positions": {}},
    **{"created_us": 0, "replica": "r", "files": [FILE]},
}


def manifest(data: bytes) -> None:
    """Reads a manifest whose checksum is right, as an attacker who can write to the store would make it."""
    text = data.decode("utf-8", "replace")
    sealed = json.dumps({"body": text, "checksum": xxhash.xxh3_128_hexdigest(text.encode())})
    found = Manifest.decode(sealed.encode(), "somewhere")
    for file in found.files:
        if ".." in Path(file.name).parts or file.name.startswith("/") or ".." in file.blob:
            raise Defect(f"a manifest names a path: {file}")


def sound_manifests() -> Iterator[bytes]:
    yield json.dumps(MANIFEST).encode()
    yield json.dumps(MANIFEST | {"format": 1}).encode()
    yield json.dumps(MANIFEST | {"files": [FILE, FILE | {"name": "000012.sst", "blob": "ab/cd.zst"}]}).encode()


INFLATED_MAX = 1 << 26


def blob(data: bytes) -> None:
    """Decodes a blob; the first byte chooses its suffix."""
    codec = Codec("zstd", KEY)
    suffix = ("", ".zst", codec.suffix, codec.suffix.removeprefix(".zst"))[data[0] % 4] if data else ""
    size = 0
    for piece in codec.decode([data[1:]], f"aa/bb{suffix}"):
        if len(piece) > 1 << 22:
            raise Defect(f"{len(piece)} bytes were inflated at once")
        size += len(piece)
        if size > INFLATED_MAX:
            return  # a reader that expects some size stops there


def sound_blobs() -> Iterator[bytes]:
    yield b"\0plain"
    yield b"\1" + b"".join(Codec("zstd").encode([b"abc" * 500]))
    yield b"\2" + b"".join(Codec("zstd", KEY).encode([b"abc" * 500]))
    yield b"\3" + b"".join(Codec("none", KEY).encode([b"abc" * 500]))
    yield b"\1" + b"".join(Codec("zstd").encode([bytes(1 << 20)] * 100))  # a bomb


# -- the commit log -----------------------------------------------------------------------------------------


def commit_log(data: bytes) -> None:
    log_format.read([(1, data)])


def sealed_commit_log(data: bytes) -> None:
    """Reads a commit log whose checksums are right."""
    head = log_format._SEGMENT.pack(log_format.SEGMENT_MAGIC, log_format.VERSION, 1)
    frame = log_format._FRAME.pack(log_format.FRAME_MAGIC, 1, len(data), binascii.crc32(data))
    sealed = b"".join(part + struct.pack(log_format._CRC.format, binascii.crc32(part)) for part in (head, frame))
    log_format.read([(1, sealed + data)])


def sound_commits() -> Iterator[bytes]:
    change = ChangeSet("Op", 1, 2, 3, "s", 4, Mutations([(b"a", b"b")], [b"c"], [])).encode()
    commit = log_format.Commit(PartitionId("Op", 3), 1, 2, change)
    yield log_format.encode(1, [commit, log_format.Gone(PartitionId("Op", 3))])[log_format.FRAME_HEADER :]


def sound_logs() -> Iterator[bytes]:
    head = log_format._SEGMENT.pack(log_format.SEGMENT_MAGIC, log_format.VERSION, 1)
    header = head + log_format._CRC.pack(binascii.crc32(head))
    yield header
    for payload in sound_commits():
        frame = log_format._FRAME.pack(log_format.FRAME_MAGIC, 1, len(payload), binascii.crc32(payload))
        yield header + frame + log_format._CRC.pack(binascii.crc32(frame)) + payload


# -- databases ----------------------------------------------------------------------------------------------


@cache
def database() -> tuple[Path, list[str]]:
    """Makes a database with tables, a log and a manifest. Returns its folder, and the names of the files to damage."""
    live, place = folder_of_this_process() / "live", folder_of_this_process() / "sound"
    _fill(live)
    shutil.copytree(live, place)  # RocksDB may delete an old log of its own later, but nothing of the copy
    names = sorted(path.name for path in place.iterdir() if path.name not in ("LOCK", "LOG", "IDENTITY"))
    return place, names


def _fill(place: Path) -> None:
    """Fills a new database, and closes it."""
    with closing(RocksEngine(1 << 20, 1 << 20).open(place, create=True)) as store:
        for round_ in range(3):
            for number in range(50):
                store.apply(Mutations([(b"k%d" % (number * 7 + round_), bytes(20))], [], []))
            store.snapshot(place.parent / f"tables-{round_}")


def stores(data: bytes) -> None:
    """Damages one file of a database, then reads it.

    Byte 0 chooses the file, bytes 1 and 2 the place, the rest replaces what is there; without a rest the file is
    removed. Fewer than 3 bytes: nothing is damaged.
    """
    sound, names = database()
    # a new folder each time: RocksDB may delete an old log by its path after the database was closed
    place = Path(tempfile.mkdtemp(prefix="damaged-", dir=sound.parent))
    try:
        _damage(shutil.copytree(sound, place, dirs_exist_ok=True), names, data)
        _read(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _damage(place: Path, names: list[str], data: bytes) -> None:
    file = place / names[data[0] % len(names)] if len(data) >= 3 else None
    if file is not None and len(data) == 3:
        file.unlink()
    elif file is not None:
        whole = bytearray(file.read_bytes())
        at = int.from_bytes(data[1:3], "big") % (len(whole) + 1)
        whole[at : at + len(data) - 3] = data[3:]
        file.write_bytes(whole)


def _read(place: Path) -> None:
    try:
        with closing(RocksEngine(1 << 20, 1 << 20).open(place)) as store:
            for _ in store.scan(b""):
                pass
            store.get(b"k7")
    except Exception as error:
        if isinstance(error, StateflowError) or (meant := meaning(error)) is None:
            raise
        raise meant from error  # as the readers of a store do


def sound_stores() -> Iterator[bytes]:
    """Yields inputs, of which only the first is known to be sound: the content of the files is not known here."""
    _, names = database()
    yield b""
    for number in range(len(names)):
        yield bytes([number, 0, 0])
        yield bytes([number, 0, 30, 1])


# -- Arrow --------------------------------------------------------------------------------------------------


@cache
def reader() -> RowReader:
    return RowReader(SCHEMA, ("k",), "Op")


def rows(data: bytes) -> None:
    list(alone(reader(), read_batch(data, SCHEMA)).read()[1])


def sound_rows() -> Iterator[bytes]:
    for count in (0, 1, 20):
        yield pa.RecordBatch.from_pylist(ROWS[:count], SCHEMA).serialize().to_pybytes()


def sound_tables() -> Iterator[bytes]:
    for count in (0, 1, 2):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, SCHEMA) as stream:
            for _ in range(count):
                stream.write_batch(pa.RecordBatch.from_pylist(ROWS[:3], SCHEMA))
        yield sink.getvalue()


# -- protobuf -----------------------------------------------------------------------------------------------

MESSAGES: list[type[Message]] = [
    getattr(module, name)
    for module in (common_pb2, controller_pb2, replica_pb2, agent_pb2)
    for name in sorted(module.DESCRIPTOR.message_types_by_name)
]
#: conversions of messages that are let in
MADE: dict[type[Message], Callable[[Any], object]] = {
    common_pb2.OperatorSpec: partial(wire.value_of, OperatorSpec),
    common_pb2.Replica: partial(wire.value_of, ReplicaInfo),
    common_pb2.Fault: faults.error_of,
    replica_pb2.SourceView: partial(wire.value_of, SourceView),
    replica_pb2.SnapshotReply: partial(wire.value_of, SnapshotInfo),
    replica_pb2.Seal: partial(wire.value_of, Seal),
    replica_pb2.StatsReply: partial(wire.value_of, reports.ReplicaStatistics),
    replica_pb2.ApplyRequest: lambda message: FrameReader().read(message),
    controller_pb2.StatusReply: partial(wire.value_of, status.ClusterReport),
    controller_pb2.Deployment: partial(wire.value_of, status.Deployment),
    controller_pb2.Reconfiguration: partial(wire.value_of, reports.Reconfiguration),
    controller_pb2.Job: partial(wire.value_of, reports.JobReport),
    controller_pb2.JobRun: partial(wire.value_of, reports.JobRun),
    controller_pb2.Sweep: partial(wire.value_of, reports.Sweep),
    controller_pb2.Version: partial(wire.value_of, reports.OperatorVersion),
}


def message(data: bytes) -> None:
    """Parses a message; the first byte chooses its kind."""
    if not data:
        return
    kind = MESSAGES[data[0] % len(MESSAGES)]
    try:
        parsed = kind.FromString(data[1:])
    except NotParsed:
        return  # gRPC itself answers such bytes
    made = MADE.get(kind, lambda _: None)
    made(checked(parsed))


def sound_deployments() -> Iterator[bytes]:
    for count in (1, 4):
        owner = ReplicaInfo("r", "s", "h:1")
        yield packed_deployment(status.Deployment(describe(Tally, count), 3, (owner,) * count, (1,) * count))


def sound_messages() -> Iterator[bytes]:
    spec = wire.message_of(common_pb2.OperatorSpec, describe(Tally, 4, "Tally"))
    source = common_pb2.Replica(name="s", site="s", address="host:1", weight=1)
    header = replica_pb2.ApplyHeader(
        operator="Tally", source="s", batch=3, input_schema=SCHEMA.serialize().to_pybytes(), sparse=True
    )
    request = replica_pb2.ApplyRequest(
        call=1, header=header, partitions=[0, 2], epochs=[1, 1], counts=[1, 0], rows=b"abc", last=True
    )
    register = controller_pb2.RegisterRequest(replica=source, ticket="t", incarnation="i")
    fault = common_pb2.Fault(code="not_owner", what="w", remedy="r", where={"partition": "3", "self": "x"})
    for sound in (spec, source, request, register, fault):
        yield bytes([MESSAGES.index(type(sound))]) + sound.SerializeToString()
    for number in range(len(MESSAGES)):
        yield bytes([number])


# -- state --------------------------------------------------------------------------------------------------

TYPES: list[Any] = [
    *(int, float, bool, str, bytes, dt.datetime, dt.date, decimal.Decimal, uuid.UUID, list[int], dict[str, float]),
    *(tuple[int, float], tuple[str, int], tuple[str, ...], set[str], int | None, list[dict[str, int]]),
]


@cache
def coders() -> list[Any]:
    return [coder_for(kind) for kind in TYPES]


def stored(data: bytes) -> None:
    """Decodes a value or a key, as a store holds it. The first byte chooses the declared type."""
    if not data:
        return
    number, body = data[0], data[1:]
    coder = coders()[number % len(TYPES)]
    decoders = [coder.decode] + ([coder.decode_key] if coder.deterministic else [])
    for decode in decoders:
        try:
            decode(body)
        except DECODE_FAILURES:
            pass  # the caller reports these, with their place
    each(cells.unpack_cell_with_expiry, cells.split_address, cells.decode_row_key, encoding.split_ordered)(body)


def sound_stored() -> Iterator[bytes]:
    now, some = dt.datetime(2026, 1, 1, tzinfo=dt.UTC), uuid.UUID(int=5)
    values = [
        *(7, 1.5, True, "text", b"bytes", now, now.date(), decimal.Decimal("1.50"), some, [1, 2], {"a": 1.0}),
        *((1, 2.0), ("a", 1), ("a", "b"), {"a"}, None, [{"a": 1}]),
    ]
    for number, (coder, value) in enumerate(zip(coders(), values, strict=True)):
        yield bytes([number]) + coder.encode(value)
        if coder.deterministic:
            yield bytes([number]) + coder.encode_key(value)
    for key in ("k", 5, ("a", 1), b"x", now, 1.5, decimal.Decimal("-2.5"), some):
        yield b"\0" + cells.encode_row_key(key)
    yield b"\0" + cells.pack_cell(b"payload")


# -- certificates, tokens, bundles --------------------------------------------------------------------------


@cache
def authority() -> tuple[Path, str]:
    folder = folder_of_this_process()
    made = Authority.init(folder / "a", "acme")
    made.issue(Identity.of("node", "edge-0"), ["edge-0.lan"], folder / "a" / "out")
    token, _ = made.token(Identity.of("data", "job", ("Pumps",)), dt.timedelta(hours=8))
    return folder / "a", token


def pem(data: bytes, label: str) -> bytes:
    text = binascii.b2a_base64(data, newline=False)
    return b"-----BEGIN %s-----\n%s\n-----END %s-----\n" % (label.encode(), text, label.encode())


def certificate(data: bytes) -> None:
    """Reads a certificate, a key or a revocation list; the first byte chooses which.

    All are DER but a list of the last kind.
    """
    folder, _ = authority()
    ca, own, key = ((folder / name).read_bytes() for name in ("ca.pem", "out/cert.pem", "out/key.pem"))
    match data[:1], data[1:]:
        case b"\0", der:
            read_certificates(pem(der, "CERTIFICATE"), "f")
            checked_pair(ca, pem(der, "CERTIFICATE"), key, dt.datetime.now(dt.UTC), "f")
        case b"\1", der:
            checked_pair(ca, own, pem(der, "PRIVATE KEY"), dt.datetime.now(dt.UTC), "f")
        case b"\2", der:
            revoked_of(pem(der, "X509 CRL"), ca, "f")
        case _, text:
            revoked_of(text, ca, "f")


def sound_certificates() -> Iterator[bytes]:
    folder, _ = authority()
    for kind, name in ((b"\0", "out/cert.pem"), (b"\0", "ca.pem"), (b"\1", "out/key.pem"), (b"\2", "crl.pem")):
        yield kind + binascii.a2b_base64(b"".join((folder / name).read_bytes().splitlines()[1:-1]))
    yield b"\3" + (folder / "crl.pem").read_bytes()


def token(data: bytes) -> None:
    decoded_token(PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("="))


def sound_tokens() -> Iterator[bytes]:
    inner = authority()[1].removeprefix(PREFIX)
    yield base64.urlsafe_b64decode(inner + "=" * (-len(inner) % 4))


def bundle(data: bytes) -> None:
    bundles.check(data, hashlib.sha256(data).hexdigest())


def sound_bundles() -> Iterator[bytes]:
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        sink = io.BytesIO()
        with zipfile.ZipFile(sink, "w", compression) as archive:
            archive.writestr(f"{bundles.PLACES[0]}/m.py", "x = 1\n" * 9)
        yield sink.getvalue()


# -- small files --------------------------------------------------------------------------------------------


@cache
def registry() -> PartitionRegistry:
    root = folder_of_this_process() / "replica"
    return PartitionRegistry(ReplicaInfo("r", "s", "h:1"), root, ReplicaSettings(), SYSTEM_CLOCK)


@cache
def own_folder() -> Path:
    folder = folder_of_this_process() / "small"
    folder.mkdir()
    return folder


def small_file(data: bytes) -> None:
    """Reads a damaged file of a data directory, of an agent, or of a cluster inside a program, and what a started
    process says."""
    folder, partitions = own_folder(), registry()
    (partitions.root / TERM).write_bytes(data)
    (partitions.root / ALONE).write_bytes(data)
    crashes = Crashes(partitions.root, partitions.environment, partitions.clock.now_us)
    for name in (CRASHES, RUNNING):
        (partitions.root / name).write_bytes(data)
    for name in (NOTE, IDENTITY, EMBEDDED):
        (folder / name).write_bytes(data)
    partitions.read_alone()
    crashes.find()
    said_in(folder)
    heard(data)
    with suppress(*MALFORMED):  # its caller reports these
        OperatorSpec.from_json(json.loads(data))
    each(
        lambda _: partitions.read_term(),
        lambda _: read_note(folder / NOTE),
        lambda _: read_identity(folder / IDENTITY),
    )(data)


def sound_small_files() -> Iterator[bytes]:
    yield b'{"ledger": "l", "term": 3}'
    yield b'{"id": "i", "name": "edge-0"}'
    yield b"edge-0"
    yield b'{"place": "p", "id": "' + b"0" * 32 + b'"}'


# -- requests of the dashboard ------------------------------------------------------------------------------


def sound_bodies() -> Iterator[bytes]:
    yield b'{"do": "migrate", "operator": "Op", "partitions": "0-3", "to": "edge-0", "max_pause_ms": 5.5}'
    yield b'{"do": "rebalance", "policies": ["ring"], "strategy": "auto"}'
    yield b'{"name": "reconfiguration/x", "change": "pause"}'
    yield b'{"chore": "verify", "operator": "Op"}'
    yield b'{"operator": "Op", "state": "n", "key": "a"}'


# -- texts --------------------------------------------------------------------------------------------------


def document(data: bytes) -> None:
    path = _yaml_file()
    path.write_bytes(data)
    documents.read_document(path)


@cache
def _yaml_file() -> Path:
    return folder_of_this_process() / "document.yaml"


def sound_documents() -> Iterator[bytes]:
    yield b"stages:\n  - operator: m:Op\n    key: [a, b]\n"


def text(data: bytes) -> None:
    said = data.decode("utf-8", "replace")
    for ask in (
        parse_name,
        Identity.of_uri,
        release_of,
        lambda one: partition_of(one, 128),
        lambda one: [*keys_meant(one)],
    ):
        ask(said)  # these answer every text
    readers: list[Callable[[str], object]] = [
        Schedule.parse,
        parse_ddl,
        JobAffinity.parse,
        check_affinity,
        addresses_of,
        decoded_token,
    ]
    each(*(lambda _, read=read: read(said) for read in readers))(data)


def sound_texts() -> Iterator[bytes]:
    yield from (
        b"*/5 8-18 * * mon-fri",
        b"0 18 29 2 *",
        b"k string, n bigint, m map<string, array<struct<a: int, b: decimal(20, 2)>>>",
        b"hard label disk=ssd:2-4",
        b"soft:30 site cloud",
        b"eu:2-4 soft 30",
        b"a:7070,b:7070,[::1]:80",
        b"000000000001-0000000000000002-3.json",
        b"stateflow://data/job/operator=Pumps",
    )


DOORS = {
    door.name: door
    for door in (
        Door("change-sets", each(change_set, ChangeSet.decode), sound_change_sets),
        Door(
            "entries",
            each(layout.Position.decode, layout.Ownership.decode, layout.Session.decode, Retired.decode),
            sound_entries,
        ),
        Door(
            "outputs",
            split_output,
            lambda: [b"", join_output(b"m", {}), join_output(b"m", {"late": b"x"})],
        ),
        Door("known", each(*(partial(_decoded, partition_count=count) for count in KNOWN_PARTITIONS)), sound_known),
        Door("deployments", unpacked_deployment, sound_deployments),
        Door("bodies", each(*(partial(read_body, kind) for kind in (Move, Named, Sweep, Lookup))), sound_bodies, 0.5),
        Door("manifests", manifest, sound_manifests),
        Door("blobs", blob, sound_blobs, 0.3),
        Door("commit-log", commit_log, sound_logs, 0.5),
        Door("commits", sealed_commit_log, sound_commits),
        Door("stores", stores, sound_stores, 0.04),
        Door("arrow-rows", rows, sound_rows, 2.0),
        Door("arrow-schema", read_schema, lambda: [SCHEMA.serialize().to_pybytes()]),
        Door("arrow-table", read_table, sound_tables),
        Door("messages", message, sound_messages, 4.0),
        Door("stored", stored, sound_stored, 2.0),
        Door("certificates", certificate, sound_certificates, 0.5),
        Door("tokens", token, sound_tokens, 0.5),
        Door("bundles", bundle, sound_bundles, 0.5),
        Door("documents", document, sound_documents, 0.2),
        Door("small-files", small_file, sound_small_files, 0.1),
        Door("texts", text, sound_texts, 0.5),
    )
}
