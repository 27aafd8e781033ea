"""POST /plants in its shortest form. docs/forty-lines.md shows what goes wrong with it."""

import hmac
import json
import os
import sqlite3
from contextlib import closing

from bottle import Bottle, HTTPError, request, response
from jsonschema import Draft202012Validator, ValidationError

TABLE = "CREATE TABLE IF NOT EXISTS plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT)"
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
MEMBERS = {"id": INT64, "name": {"type": "string"}, "tag": {"type": "string"}}
SCHEMA = {"type": "object", "required": ["id", "name"], "properties": MEMBERS}


def require_token(callback):
    def authorized(**arguments):
        sent = request.get_header("Authorization", "")
        if not hmac.compare_digest(sent, f"Bearer {os.environ['PLANTS_TOKENS']}"):
            raise HTTPError(401, "a bearer token is required")
        return callback(**arguments)

    return authorized


def answer_error(error):
    response.content_type = "application/json"
    return json.dumps({"error": error.status_code, "message": error.body})


with closing(sqlite3.connect("plants.db")) as connection:
    connection.execute(TABLE)
app = Bottle()
app.install(require_token)
app.default_error_handler = answer_error


@app.post("/plants")
def create_plant():
    plant = request.json
    try:
        Draft202012Validator(SCHEMA).validate(plant)
    except ValidationError as error:
        raise HTTPError(400, error.message) from None
    row = plant["id"], plant["name"], plant.get("tag")
    with closing(sqlite3.connect("plants.db")) as connection, connection:
        connection.execute("INSERT INTO plants VALUES (?, ?, ?)", row)
    return {name: plant[name] for name in ("name", "tag") if name in plant}
