"""FastAPI and SQLModel, as SQLModel's tutorial has them, with the same durability.

https://fastapi.tiangolo.com/tutorial/sql-databases/ and .../advanced/security/
"""

import os
import secrets
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import StrictInt, StrictStr
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError
from sqlmodel import Field, Session, SQLModel, create_engine


class PlantBase(SQLModel):
    name: StrictStr = Field(regex=r"^[^\x00]*$")
    tag: StrictStr | None = Field(default=None, regex=r"^[^\x00]*$")


class Plant(PlantBase, table=True):
    __tablename__ = "plants"
    id: int = Field(primary_key=True)


class NewPlant(PlantBase):
    id: StrictInt = Field(ge=-(2**63), lt=2**63)


engine = create_engine(os.environ["DATABASE_URL"], connect_args={"check_same_thread": False})


@event.listens_for(engine, "connect")
def make_durable(connection, record):
    connection.execute("PRAGMA busy_timeout = 10000")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")


def get_session():
    with Session(engine) as session:
        yield session


def check_token(credentials: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())]):
    if not secrets.compare_digest(credentials.credentials, os.environ["PLANTS_TOKENS"]):
        raise HTTPException(status_code=401)


app = FastAPI(dependencies=[Depends(check_token)])


@app.on_event("startup")
def on_startup():
    SQLModel.metadata.create_all(engine)


@app.post("/plants", response_model=PlantBase)
def create_plant(plant: NewPlant, session: Annotated[Session, Depends(get_session)]):
    stored = Plant.model_validate(plant)
    session.add(stored)
    try:
        session.commit()
    except IntegrityError:
        raise HTTPException(status_code=409) from None
    session.refresh(stored)
    return stored
