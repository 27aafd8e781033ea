"""FastAPI and SQLModel, as its tutorial shows them, with a token. SQLite syncs each commit.

https://sqlmodel.tiangolo.com/tutorial/fastapi/ and https://fastapi.tiangolo.com/tutorial/security/
"""

import os
import secrets
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import StrictInt, StrictStr
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


def check_token(credentials: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())]):
    if not secrets.compare_digest(credentials.credentials, os.environ["PLANTS_TOKENS"]):
        raise HTTPException(status_code=401)


engine = create_engine(os.environ["DATABASE_URL"], connect_args={"timeout": 10})
app = FastAPI(dependencies=[Depends(check_token)])


@app.post("/plants", response_model=PlantBase)
def create_plant(plant: NewPlant):
    with Session(engine) as session:
        stored = Plant.model_validate(plant)
        session.add(stored)
        try:
            session.commit()
        except IntegrityError:
            raise HTTPException(status_code=409) from None
        session.refresh(stored)
        return stored
