"""The ceiling: Bottle reads the body and returns a constant, with the service's own settings."""

import bottle

app = bottle.Bottle()


@app.post("/plants")
def create_plant():
    bottle.request.environ["wsgi.input"].read()
    return b'{"name": "Monstera", "tag": "indoor"}'
