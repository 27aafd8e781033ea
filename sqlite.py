"""The engine for a SQLite file in WAL mode, synced at every commit (sqlite.org/wal.html).

Contains no queue and no limits for requests: storage.py has those.
"""

import contextlib
import errno
import fcntl
import os
import pwd
import sqlite3
import stat
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from engine import Engine, Inserted, NeedsOperator, Rejected, Unavailable
from schemas import KINDS, Plant

APPLICATION_ID = 0x504C4E54  # "PLNT"
VERSION = 1  # of the tables in a file
DURABLE = "PRAGMA synchronous = FULL; PRAGMA fullfsync = ON;"  # macOS: fsync leaves it in the drive
SCHEMA = f"""{DURABLE} BEGIN;
    CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT;
    PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; COMMIT"""
# What the table has to be like; it may have more columns.
FIND_COLUMNS = """SELECT lower(info.name), upper(info.type), pk, strict
    FROM pragma_table_info('plants') AS info, pragma_table_list('plants')"""
with contextlib.closing(sqlite3.connect(":memory:")) as model:
    model.executescript(SCHEMA)
    EXPECTED = set(model.execute(FIND_COLUMNS))
# A real write that changes nothing: BEGIN IMMEDIATE succeeds on read-only files.
TRY_A_WRITE = f"PRAGMA application_id = {APPLICATION_ID}"
COLUMNS, ROW = ", ".join(Plant._fields), f"({', '.join('?' * len(Plant._fields))})"
INTO = f"INTO plants ({COLUMNS}) VALUES %s"
# Whatever the table's own ON CONFLICT clauses are; a trigger's have to work in the second.
INSERT = f"INSERT OR ABORT {INTO}"
INSERT_NEW = f"INSERT {INTO} ON CONFLICT DO NOTHING RETURNING id"
# A statement that does not compile does not notice that another program has changed the tables.
NOTICE_CHANGES = "SELECT 1 FROM sqlite_schema LIMIT 0"
TRY_TO_COMPILE = f"EXPLAIN {INSERT_NEW % ROW.replace('?', 'NULL')}"
SELECT = f"SELECT {COLUMNS} FROM plants WHERE id >= ? ORDER BY id LIMIT ?"
MAX_ROWS = 100  # that are read at once
MAX_ID = 2**63 - 1
# Somebody else may have written to the file, or something (sqlite.org/security.html).
SETTINGS = f"{DURABLE} PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON"
# A plant is at fault, or it will pass; other codes (sqlite.org/rescode.html) need an operator.
AT_FAULT = {sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG}
TRANSIENT = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_PROTOCOL}
DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, 0}  # 0: a text that is not UTF-8
DAMAGED = 'see "The file is damaged" in docs/data.md'
FOREIGN = f"is empty, damaged or another program's; {DAMAGED}"
LOST = "was deleted or replaced: see docs/data.md, and only then restart"


class SQLiteEngine(Engine):
    """A connection to a file that several processes write to, one at a time.

    Everything that writes or checkpoints, opening and closing too, holds a lock: processes that
    meet at SQLite's own lock sleep for milliseconds, and SQLite before 3.51.3 can damage the file
    if one checkpoints while another writes (sqlite.org/wal.html, "The WAL-Reset Bug").
    """

    def __init__(self, path: str, identity: str | None, busy_timeout: float) -> None:
        """Refuse a file at `path` that is not that of `identity`; wait some seconds for SQLite."""
        if not path or path == ":memory:" or "\0" in path:
            raise NeedsOperator("DATABASE_URL must name a file: what is in memory is not stored")
        # SQLite keeps its other files beside what a link leads to.
        self._path = os.path.realpath(path)
        self.identity, self._busy_timeout = identity, busy_timeout
        self.description = f"SQLite {sqlite3.sqlite_version} in {self._path}"
        self._connection: sqlite3.Connection | None = None
        self._files: list[tuple[int, int]] = []  # those that are open; none once one is lost

    def insert(self, plants: Sequence[Plant]) -> Inserted:
        try:
            connection = self._connection or self._open()
            if self._files:
                if not plants:
                    check_table(connection, self._path)
                inserted = insert_new(connection, plants)
                # What was committed to a file that is no longer there is not stored.
                if self._files == find_files(self._path):
                    return inserted
                self._files = []
        except (sqlite3.Error, OSError, MemoryError) as error:
            with contextlib.suppress(OSError):
                if self._files not in ([], find_files(self._path)):
                    raise NeedsOperator(f"{self._path} {LOST}") from None
            if len(plants) > 1 and primary_code(error) in DAMAGE:
                raise Rejected("SQLite: where one of them belongs, the file is damaged") from None
            raise explain(self._path, error) from None
        raise NeedsOperator(f"{self._path} {LOST}")

    def rows(self) -> Iterator[Plant]:
        try:
            with contextlib.closing(self._connect("ro")) as connection:
                connection.execute("BEGIN")  # one snapshot, whatever is written meanwhile
                for row in read_rows(connection, self._path):
                    values = zip(KINDS.values(), row, strict=True)  # SQLite has no booleans
                    yield Plant._make(each if each is None else kind(each) for kind, each in values)
        except (sqlite3.Error, OSError) as error:
            raise explain(self._path, error) from None

    def close(self) -> None:
        if self._connection is not None:
            # Where the folder is gone, and the lock with it, there is nothing to checkpoint.
            with contextlib.suppress(Unavailable), self.locked():
                self._connection.close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        name = f"{self._path}-lock"
        self.obstacle = f"other processes hold the lock {name}; lslocks shows which"
        try:
            # First refuse another program's file, with nothing made beside it. Not while it is open
            # in this process: to close it then would undo SQLite's locks.
            if self._connection is None and not os.path.exists(name):
                with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
                    header = file.read(72)  # sqlite.org/fileformat.html
                    if header[68:] != APPLICATION_ID.to_bytes(4):
                        raise NeedsOperator(f"{self._path} {FOREIGN}")
            lock = take_lock(name, self._path)
        except OSError as error:
            raise explain(error.filename or name, error) from None
        self.obstacle = f"the disk, or a program (see lslocks) that has locked {self._path}"
        try:
            yield
        finally:
            os.close(lock)

    def _open(self) -> sqlite3.Connection:
        """Connect to the file; make it first if there is none and there was none at the start."""
        if self.identity is None and not os.path.exists(self._path):
            self._create()
        found = find_files(self._path, "")
        # Before SQLite opens the file, as it would replay a -wal of another one into it.
        if self.identity not in (None, str(found)):
            raise NeedsOperator(f"{self._path} {LOST}")
        if os.path.isfile(self._path) and os.stat(self._path).st_nlink > 1:
            raise NeedsOperator(f"{self._path} has a hard link; with two names it has two -wal")
        connection = self._connect("rw")
        # The checkpoint has made -wal and -shm, if they were not there.
        self._files = found + find_files(self._path, "-wal", "-shm")
        self.identity, self._connection = str(found), connection
        return connection

    def _create(self) -> None:
        """Make the file under another name first: whoever is killed meanwhile leaves that one."""
        if os.path.exists(f"{self._path}-wal"):  # SQLite would replay it into the new file
            raise NeedsOperator(
                f"{self._path} is missing, but not its -wal: restore a backup, or move that away"
            )
        new = f"{self._path}-new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)  # SQLite deletes a journal that an empty file has
        # Who may read the file can hold SQLite's locks, too.
        os.close(os.open(new, os.O_CREAT | os.O_EXCL, 0o600))
        with contextlib.closing(sqlite3.connect(new)) as connection:
            connection.executescript(SCHEMA)
        os.rename(new, self._path)  # SQLite syncs the folder when it changes the journal mode

    def _connect(self, mode: str) -> sqlite3.Connection:
        if not os.path.exists(self._path):
            raise NeedsOperator(f"{self._path}: there is no such file")
        # On a full disk SQLite, which maps 32 KiB of -shm to begin with, would get a SIGBUS.
        folder, is_needed = os.path.dirname(self._path), not os.path.exists(f"{self._path}-shm")
        if os.access(folder, os.W_OK) and (mode == "rw" or is_needed):
            with tempfile.TemporaryFile(dir=folder) as trial:
                trial.write(bytes(2**16))
        connection = sqlite3.connect(
            f"file:{quote(os.fsencode(self._path))}?mode={mode}",
            timeout=self._busy_timeout,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=1,  # each keeps the plants that it was last used for
            uri=True,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            connection.executescript(SETTINGS)
            if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
                raise NeedsOperator(f"{self._path} {FOREIGN}")
            if connection.execute("PRAGMA user_version").fetchone()[0] > VERSION:
                raise NeedsOperator(f"{self._path} is of a newer version of this service; run that")
            if mode == "rw":
                self._prepare(connection)
            stack.pop_all()
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make all that is in the file durable."""
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise NeedsOperator(f"{self._path}: no WAL mode on this file system; use a local disk")
        # A killed process may leave frames in the WAL that can be read but are not synced: a retry
        # would get a 200 for them. The checkpoint syncs them. The write after it restarts the WAL,
        # in case the sync of that process had failed.
        if connection.execute("PRAGMA wal_checkpoint").fetchone()[0]:
            raise Unavailable(f"{self._path}: another program is at work on it")
        connection.execute(TRY_A_WRITE)
        check_table(connection, self._path)


def take_lock(name: str, database: str) -> int:
    """Return the descriptor of a file that one process on the host holds until it closes it.

    It is only for those who may write plants, as who can open it can hold it. Raises OSError.
    """
    while True:
        lock = os.open(name, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        own = os.fstat(lock)
        with contextlib.suppress(OSError):  # there is no database yet, or its group is not ours
            status = os.stat(database)
            mode = 0o660 if status.st_mode & stat.S_IWGRP else 0o600
            is_right = (own.st_gid, stat.S_IMODE(own.st_mode)) == (status.st_gid, mode)
            if own.st_uid == os.geteuid() and own.st_nlink == 1 and not is_right:
                # As with SQLite's own files, the one that root makes is for the database's owner.
                os.fchown(lock, -1 if own.st_uid else status.st_uid, status.st_gid)
                os.fchmod(lock, mode)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(own, os.stat(name)):
                return lock
        os.close(lock)  # it was deleted or replaced: others lock another file


def find_files(path: str, *suffixes: str) -> list[tuple[int, int]]:
    """Return device and inode of the file, -wal and -shm, or some; none if one is missing."""
    with contextlib.suppress(FileNotFoundError):
        found = [os.stat(path + suffix) for suffix in suffixes or ("", "-wal", "-shm")]
        return [(status.st_dev, status.st_ino) for status in found]
    return []


def check_table(connection: sqlite3.Connection, path: str) -> None:
    """Raise NeedsOperator unless the table is as it has to be."""
    if wrong := EXPECTED.difference(connection.execute(FIND_COLUMNS)):
        names = ", ".join(sorted(name for name, *_ in wrong))
        raise NeedsOperator(
            f"{path}: plants is missing, a view or not STRICT, or differs in {names}; "
            "copy it into a new file with transfer.py"
        )


def insert_new(connection: sqlite3.Connection, plants: Sequence[Plant]) -> Inserted:
    """Insert the plants whose id is new, in autocommit; without plants, write nothing new."""
    if not plants:
        connection.execute(TRY_TO_COMPILE)
        connection.execute(TRY_A_WRITE)
        return Inserted()
    try:
        # Most often all are new, and then RETURNING would take as long as the rest.
        if run(connection, INSERT, plants).rowcount == len(plants):
            return Inserted([plant.id for plant in plants])
    except sqlite3.DatabaseError as error:
        if primary_code(error) not in AT_FAULT:
            raise
    connection.execute(NOTICE_CHANGES).close()
    # What is stored is not tried again, as a newer trigger may be against it.
    existing = find(connection, plants)
    new, rest = set[int](), [plant for plant in plants if plant.id not in existing]
    try:
        if rest:
            new = {row[0] for row in run(connection, INSERT_NEW, rest)}
    except sqlite3.DatabaseError as error:
        if primary_code(error) not in AT_FAULT or "NULL constraint failed: plants." in str(error):
            raise
        # Without the message, as a trigger's may have something of the plant in it.
        raise Rejected(f"SQLite: {error.sqlite_errorname}") from None
    existing |= find(connection, rest)
    if not all(plant.id in existing for plant in rest):
        raise Rejected("SQLite: a trigger or a unique index keeps it out")
    return Inserted(new, existing=existing)


def run(connection: sqlite3.Connection, text: str, plants: Sequence[Plant]) -> sqlite3.Cursor:
    """Execute a text of those above, into which only placeholders are put."""
    rows = ", ".join([ROW] * len(plants))
    return connection.execute(text % rows, [value for plant in plants for value in plant])


def find(connection: sqlite3.Connection, plants: Sequence[Plant]) -> dict[int, Plant]:
    """Return what is stored under the ids of `plants`."""
    ids = [plant.id for plant in plants]
    select = f"SELECT {COLUMNS} FROM plants WHERE id IN ({', '.join('?' * len(ids))})"
    return {plant.id: plant for plant in map(Plant._make, connection.execute(select, ids))}


def read_rows(connection: sqlite3.Connection, path: str) -> Iterator[Any]:
    """Yield all rows that can be read, in the order of id. Raises NeedsOperator if some can't."""
    gaps, step = [], 0  # ids from one try to the next, once something is damaged
    low = gap = failed = -MAX_ID - 1  # all rows below `gap` were read
    while low <= MAX_ID:
        try:
            rows = connection.execute(SELECT, (low, 1 if step else MAX_ROWS)).fetchall()
        except sqlite3.DatabaseError as error:
            if primary_code(error) not in DAMAGE:
                raise
            if step:  # what is damaged is narrow where ids are close, and else wide
                failed, low = low, min(low + step, max(low + 1, MAX_ID))
            step += step // 64 + 1
            continue
        if step > 1:  # there may be rows that are nearer
            low, step = failed + 1, 1
            continue
        if gap < low:
            gaps.append(f"{gap} to {low - 1}")
            step = 0
        yield from rows
        low = gap = rows[-1][0] + 1 if rows else MAX_ID + 1
    if gap <= MAX_ID:
        gaps.append(f"{gap} to {MAX_ID}")
    if gaps:
        raise NeedsOperator(f"{path}: all but the ids {', '.join(gaps)} could be read; {DAMAGED}")


def primary_code(error: BaseException) -> int:
    """Return SQLite's code without its details; -1 if it is not SQLite that failed."""
    is_own = isinstance(error, sqlite3.Error)
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF if is_own else -1


def explain(path: str, error: sqlite3.Error | OSError | MemoryError) -> Exception:
    """Return the error of ours that SQLite's or the system's means: one line, nothing of plants."""
    if isinstance(error, sqlite3.ProgrammingError):
        return error  # a bug, and nothing for an operator
    code, is_full = primary_code(error), getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
    reason = getattr(error, "strerror", None) or str(error) or "out of memory"
    if code in TRANSIENT or is_full or isinstance(error, MemoryError):
        return Unavailable(f"{path}: {reason}")
    if code in DAMAGE:  # SQLite's own message may have the text that is not UTF-8
        return NeedsOperator(f"{path}: {reason if code else 'no UTF-8 in a text'}; {DAMAGED}")
    if isinstance(error, FileNotFoundError):
        path, reason = os.path.dirname(path), "no such folder; make or mount it"
    for place in filter(os.path.exists, (path, os.path.dirname(path))):
        if not os.access(place, os.W_OK):
            names = {user.pw_uid: user.pw_name for user in pwd.getpwall()}
            owner, user = (names.get(n, n) for n in (os.stat(place).st_uid, os.geteuid()))
            reason = f"{reason}; {place} belongs to {owner}, and this runs as {user}"
            if os.statvfs(place).f_flag & os.ST_RDONLY:
                reason = f"{place} is mounted read-only"
            break
    return NeedsOperator(f"{path}: {reason}")
