"""Flask and Flask-SQLAlchemy, as its quick start shows them, with a token. Commits are synced.

https://flask-sqlalchemy.readthedocs.io/en/stable/quickstart/
"""

import os
import secrets

from flask import Flask, abort, request
from flask_sqlalchemy import SQLAlchemy
from jsonschema import Draft202012Validator
from sqlalchemy.exc import IntegrityError

TEXT = {"type": "string", "pattern": r"^[^\x00]*$"}
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
PLANT = {"properties": {"id": INT64, "name": TEXT, "tag": TEXT}, "required": ["id", "name"]}

validator = Draft202012Validator({"type": "object", **PLANT})
app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"connect_args": {"timeout": 10}}
db = SQLAlchemy(app)


class Plant(db.Model):
    __tablename__ = "plants"
    id = db.Column(db.Integer, primary_key=True)
    name = db.Column(db.String, nullable=False)
    tag = db.Column(db.String)


@app.post("/plants")
def create_plant():
    given, wanted = request.headers.get("Authorization", ""), os.environ["PLANTS_TOKENS"]
    if not secrets.compare_digest(given, f"Bearer {wanted}"):
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
    return {"name": stored.name} if stored.tag is None else {"name": stored.name, "tag": stored.tag}
