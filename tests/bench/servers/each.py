"""A commit for each request: the service, but with one plant in each batch."""

import os

import storage
from app import create_app

storage.MAX_BATCH = 1
plants = storage.Storage.from_url(os.environ["DATABASE_URL"])
app = create_app(plants, [os.environ["PLANTS_TOKENS"]])
