"""Flask and Flask-SQLAlchemy, as its quick start has them, with the same durability.

https://flask-sqlalchemy.readthedocs.io/en/stable/quickstart/
"""

import json
import os
import secrets
from pathlib import Path

from flask import Flask, abort, request
from flask_sqlalchemy import SQLAlchemy
from jsonschema import Draft202012Validator
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMAS = Path(__file__).parents[3] / "schemas"


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)
app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
db.init_app(app)


class Plant(db.Model):
    __tablename__ = "plants"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    tag: Mapped[str | None]


def flattened() -> dict:
    plant = json.loads((SCHEMAS / "plant.json").read_text())
    own = json.loads((SCHEMAS / "new-plant.json").read_text())["allOf"][1]
    return {
        "type": "object",
        "properties": {**plant["properties"], **own["properties"]},
        "required": [*plant["required"], *own["required"]],
    }


validator = Draft202012Validator(flattened())

with app.app_context():

    @event.listens_for(db.engine, "connect")
    def make_durable(connection, record):
        connection.execute("PRAGMA busy_timeout = 10000")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")

    db.create_all()


@app.post("/plants")
def create_plant():
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme != "Bearer" or not secrets.compare_digest(token, os.environ["PLANTS_TOKENS"]):
        abort(401)
    plant = request.get_json()
    if not validator.is_valid(plant):
        abort(400)
    stored = Plant(id=plant["id"], name=plant["name"], tag=plant.get("tag"))
    db.session.add(stored)
    try:
        db.session.commit()
    except IntegrityError:
        abort(409)
    answer = {"name": stored.name, "tag": stored.tag}
    return {name: value for name, value in answer.items() if value is not None}
