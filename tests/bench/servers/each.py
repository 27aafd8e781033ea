"""A commit for each request: the service, but with one plant in each batch."""

import os

import storage
from app import call_blocking, create_app

storage.MAX_BATCH = 1
url = os.environ["DATABASE_URL"]
plants = storage.Storage.from_url(url, call_blocking=call_blocking)
app = create_app(plants, [os.environ["PLANTS_TOKENS"]])
