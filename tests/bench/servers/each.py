"""A commit for each request: the service, but with one plant in each batch."""

import os

from app import create_app
from storage import Storage

storage = Storage.from_url(os.environ["DATABASE_URL"], max_batch=1)
app = create_app(storage, [os.environ["PLANTS_TOKENS"]])
