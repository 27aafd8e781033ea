"""POST /plants after the twelve patches of ../forty-lines.md, which has what is left to mend.

To start it: gunicorn --workers 2 --threads 16 climbed:app
"""

import fcntl
import hmac
import json
import os
import sqlite3
import sys
import threading
from concurrent.futures import Future
from contextlib import closing
from decimal import Decimal
from queue import SimpleQueue

from bottle import Bottle, HTTPError, request, response
from gunicorn import util
from jsonschema import Draft202012Validator

TABLE = "CREATE TABLE IF NOT EXISTS plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT)"
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
# Without NUL and halves of surrogate pairs.
TEXT = {"type": "string", "pattern": "^[^\0\ud800-\udfff]*$"}
MEMBERS = {"id": INT64, "name": TEXT, "tag": TEXT}
SCHEMA = {"type": "object", "required": ["id", "name"], "properties": MEMBERS}
BODY_LIMIT = 2**16  # bytes
WAIT_LIMIT = 10  # seconds
TOKENS = os.environ.get("PLANTS_TOKENS", "").replace(",", " ").split()
if not TOKENS or len(min(TOKENS, key=len)) < 16:
    raise RuntimeError("PLANTS_TOKENS must be tokens of at least 16 characters")


def require_token(callback):
    def authorized(**arguments):
        scheme, _, token = request.get_header("Authorization", "").partition(" ")
        sent = token.strip().encode()
        known = [hmac.compare_digest(sent, each.encode()) for each in TOKENS]
        if scheme.lower() != "bearer" or not any(known):
            raise HTTPError(401, "a bearer token is required", WWW_Authenticate="Bearer")
        return callback(**arguments)

    return authorized


def answer_error(error):
    response.content_type = "application/json"
    return json.dumps({"error": error.status_code, "message": error.body})


def refuse(client, status, reason, message):
    """Answer what gunicorn's parser refuses, which never comes to the application."""
    body = json.dumps({"error": status, "message": message})
    head = f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: application/json"
    util.write_nonblock(client, f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


def unite(pairs):
    """Return a dict of a JSON object's members, of which no two may have the same name."""
    members = {}
    for name, value in pairs:
        if name in members:
            raise HTTPError(400, f"{name}: given more than once")
        members[name] = value
    return members


def read_number(digits):
    """Return a number with a fraction or an exponent; as an int where it is one, up to 2**53."""
    number = Decimal(digits)
    is_whole = abs(number) <= 2**53 and number == number.to_integral_value()
    return int(number) if is_whole else number


def read_json():
    """Return what the body says. request.json would undo the chunks, which gunicorn has undone."""
    if request.content_type.partition(";")[0].strip().lower() != "application/json":
        raise HTTPError(415, "Content-Type must be application/json")
    try:
        body = request.environ["wsgi.input"].read(BODY_LIMIT + 1)
    except Exception as error:  # gunicorn has several for chunks that are none
        raise HTTPError(400, f"the body could not be read: {error}") from None
    if len(body) > BODY_LIMIT:
        raise HTTPError(413, f"the body must not be longer than {BODY_LIMIT} bytes")
    try:
        return json.loads(body, object_pairs_hook=unite, parse_float=read_number)
    except (ValueError, ArithmeticError, RecursionError):
        raise HTTPError(400, "the body is not JSON") from None


util.write_error = refuse
with closing(sqlite3.connect("plants.db")) as connection:
    connection.execute(TABLE)
app = Bottle()
app.install(require_token)
app.default_error_handler = answer_error
queue = SimpleQueue()  # of rows, each with the Future that its request waits for


def store(row):
    """Let the writer store a row; return what is stored under its id then."""
    outcome = Future()
    queue.put((row, outcome))
    return outcome.result(WAIT_LIMIT)


def write_forever():
    """Write all rows that are in the queue, in one commit, and tell those who wait for them."""
    while True:
        batch = [queue.get()]
        try:
            with open("plants.lock", "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
                while not queue.empty():
                    batch.append(queue.get())
                stored = write([row for row, _ in batch])
            for (number, *_), outcome in batch:
                outcome.set_result(stored[number])
        except Exception as error:
            for _, outcome in batch:
                outcome.set_exception(error)


def write(rows):
    """Store the rows whose id is new, in one commit; return what is stored under their ids."""
    with closing(sqlite3.connect("plants.db")) as connection, connection:
        connection.execute("PRAGMA synchronous = EXTRA")
        insert = "INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET id = id"
        connection.executemany(insert, rows)
        select = "SELECT * FROM plants WHERE id = ?"
        return {row[0]: connection.execute(select, row[:1]).fetchone() for row in rows}


threading.Thread(target=write_forever, daemon=True).start()


@app.post("/plants")
def create_plant():
    plant = read_json()
    errors = Draft202012Validator(SCHEMA).iter_errors(plant)
    if violations := [f"{error.json_path}: {error.message}" for error in errors]:
        raise HTTPError(400, "; ".join(violations)[:1000])
    row = plant["id"], plant["name"], plant.get("tag")
    try:
        stored = store(row)
    except (sqlite3.OperationalError, TimeoutError) as error:
        print(f"plants.db: {error!r}", file=sys.stderr)
        message = "not stored now; it is safe to send the same plant again"
        raise HTTPError(503, message, Retry_After="1") from None
    if stored != row:
        raise HTTPError(409, f"id: {plant['id']} is taken by another plant")
    return {name: plant[name] for name in ("name", "tag") if name in plant}
