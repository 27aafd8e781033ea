"""What is stored, read past the service."""

import contextlib
import sqlite3

Row = tuple[int, str, str | None]
SELECT = "SELECT id, name, tag FROM plants ORDER BY id"


def read_rows(url: str) -> list[Row]:
    """All rows of the table, in the order of id; a SQLite file is as it should be."""
    if not url.startswith("sqlite:"):
        import psycopg  # most tests do without

        with psycopg.connect(url) as connection:
            return connection.execute(SELECT).fetchall()
    path = url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return file.execute(SELECT).fetchall()


def read_names(url: str) -> dict[int, str]:
    """The names of all plants that are stored, by id."""
    return {number: name for number, name, _ in read_rows(url)}
